"""Blocks for an engine without a memory manager beside it."""

from engine.kv_pool import BLOCK_SIZE
from engine.memory_client import AcquireResult, AcquireStatus, ForkResult, Update, UpdateAnswer


class PlainMemory:
    """A `MemoryClient` for a pool that is large enough: blocks are lent, never shared."""

    epoch_ended = False

    def __init__(self) -> None:
        self._free: list[int] = []
        self._tables: dict[int, list[int]] = {}
        self._num_tokens: dict[int, int] = {}
        self._answer: UpdateAnswer | None = None

    def register(self, num_blocks: int, model_fingerprint: str, timeout_s: float) -> bool:
        self._free = list(range(num_blocks))
        self._tables.clear()
        return True

    def send(self, update: Update) -> None:
        for advance in update.advances:
            self._num_tokens[advance.sequence_id] += len(advance.tokens)
        for truncate in update.truncates:
            table = self._tables[truncate.sequence_id]
            self._free += table[truncate.num_blocks_kept :]
            del table[truncate.num_blocks_kept :]
        for sequence_id in update.releases:
            self._free += self._tables.pop(sequence_id)
        rooms = [self._grow(room.sequence_id, room.num_tokens_ahead) for room in update.rooms]
        acquires = []
        for acquire in update.acquires:
            self._tables[acquire.sequence_id] = []
            self._num_tokens[acquire.sequence_id] = len(acquire.tokens)
            table = self._grow(acquire.sequence_id, 0)
            acquires.append(AcquireResult(AcquireStatus.GRANTED, table, 0, len(table), len(table)))
        forks = [ForkResult(False, []) for _ in update.forks]
        self._answer = UpdateAnswer([], [], forks, rooms, acquires, [], len(self._free), 0, 0)

    def receive(self, timeout_s: float) -> UpdateAnswer | None:
        return self._answer

    def _grow(self, sequence_id: int, num_tokens_ahead: int) -> list[int]:
        """Blocks appended so that there is room for so many tokens beyond the known ones."""
        table = self._tables[sequence_id]
        wanted = -(-(self._num_tokens[sequence_id] + num_tokens_ahead) // BLOCK_SIZE)
        granted = [self._free.pop() for _ in range(wanted - len(table))]
        table += granted
        return granted
