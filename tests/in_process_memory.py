"""The engine's `MemoryClient` over a memory manager in the same process, through the same messages."""

import random

from engine.errors import MemoryManagerError, StaleEpochError
from engine.kv_pool import BLOCK_SIZE
from engine.memory_client import Update, UpdateAnswer
from memory_manager import MemoryManager
from memory_manager.errors import MemoryManagerError as Refusal
from memory_manager.errors import PreconditionError
from services.engine.memory_convert import answer_from_pb, update_to_pb
from services.memory.convert import answer_to_pb, update_from_pb


class InProcessMemory:
    def __init__(self, manager: MemoryManager, engine_id: str = "engine-0") -> None:
        self.manager = manager
        self.epoch_ended = False
        self.refusals: list[str] = []  # calls that were wrong; the engine recovers from them
        self._engine_id = engine_id
        self._epoch = 0
        self._op_seq = 0
        self._answer: UpdateAnswer | None = None

    def register(self, num_blocks: int, model_fingerprint: str, timeout_s: float) -> bool:
        registration = self.manager.register_engine(
            self._engine_id, num_blocks, BLOCK_SIZE, model_fingerprint
        )
        self._epoch, self._op_seq, self.epoch_ended = registration.epoch, 0, False
        return True

    def send(self, update: Update) -> None:
        self._op_seq += 1
        request = update_from_pb(update_to_pb(update, self._epoch, self._op_seq))
        try:
            self._answer = answer_from_pb(answer_to_pb(self.manager.update_sequences(request)))
        except PreconditionError as error:
            raise StaleEpochError(str(error)) from error
        except Refusal as error:
            self.refusals.append(f"{error.reason}: {error}")
            raise MemoryManagerError(f"{error.reason}: {error}") from error

    def receive(self, timeout_s: float) -> UpdateAnswer | None:
        answer, self._answer = self._answer, None
        return answer


class LateMemory(InProcessMemory):
    """Answers some steps late, as another process may."""

    def __init__(self, manager: MemoryManager, rng: random.Random) -> None:
        super().__init__(manager)
        self._rng = rng

    def receive(self, timeout_s: float) -> UpdateAnswer | None:
        return None if self._rng.random() < 0.5 else super().receive(timeout_s)
