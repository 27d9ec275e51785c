"""What a test says as an engine: one call a method, steps and op_seq kept."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from memory_manager import (
    Acquire,
    AcquireResult,
    Advance,
    Fork,
    MemoryConfig,
    MemoryManager,
    Release,
    Room,
    TenantLimits,
    Truncate,
    UpdateAnswer,
    UpdateRequest,
)

Tokens = Sequence[int] | range


def int32s(values: Tokens) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(list(values), np.int32)


def int64s(values: Tokens) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(list(values), np.int64)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class EngineSide:
    """An engine with `num_blocks` blocks at a manager of its own, or at a given one."""

    def __init__(
        self,
        num_blocks: int = 64,
        tenants: dict[str, TenantLimits] | None = None,
        *,
        manager: MemoryManager | None = None,
        engine_id: str = "engine",
        model: str = "model",
        min_wait_blocks: int = 4,
    ) -> None:
        self.clock = Clock()
        self.manager = manager or MemoryManager(
            MemoryConfig(tenants=tenants or {}, min_wait_blocks=min_wait_blocks), self.clock
        )
        self.engine_id = engine_id
        self.epoch = self.manager.register_engine(engine_id, num_blocks, 16, model).epoch
        self.op_seq = 0
        self.launched = self.completed = 0

    def call(self, **lists: Any) -> UpdateAnswer:
        request = UpdateRequest(self.epoch, self.op_seq + 1, self.launched, self.completed, **lists)
        answer = self.manager.update_sequences(request)
        self.op_seq += 1
        assert self.manager.check_integrity() == []
        return answer

    def acquire(self, sequence_id: int, tokens: Tokens, **options: Any) -> AcquireResult:
        return self.call(acquires=(Acquire(sequence_id, int32s(tokens), **options),)).acquires[0]

    def acquire_together(self, *acquires: Acquire) -> tuple[AcquireResult, ...]:
        return self.call(acquires=acquires).acquires

    def advance(self, sequence_id: int, tokens: Tokens, num_written: int) -> UpdateAnswer:
        columns = (int64s([sequence_id]), int32s([len(tokens)]), int32s(tokens), int32s([num_written]))
        return self.call(advance=Advance(*columns))

    def write(self, sequence_id: int, num_written: int) -> UpdateAnswer:
        """Says how many of the sequence's tokens have their K/V in the pool."""
        return self.advance(sequence_id, [], num_written)

    def truncate(self, sequence_id: int, num_kept: int) -> UpdateAnswer:
        return self.call(truncate=Truncate(int64s([sequence_id]), int32s([num_kept])))

    def release(self, *sequence_ids: int) -> UpdateAnswer:
        return self.call(release=Release(int64s(sequence_ids)))

    def fork(self, parent_id: int, *child_ids: int) -> UpdateAnswer:
        return self.call(fork=Fork(int64s([parent_id] * len(child_ids)), int64s(child_ids)))

    def room(self, sequence_id: int, num_tokens_ahead: int) -> UpdateAnswer:
        return self.call(room=Room(int64s([sequence_id]), int32s([num_tokens_ahead])))

    def finish(self, sequence_id: int, tokens: Tokens, **options: Any) -> AcquireResult:
        """A whole life: acquire, compute everything, release. Leaves the prompt cached."""
        result = self.acquire(sequence_id, tokens, **options)
        self.write(sequence_id, len(tokens))
        self.release(sequence_id)
        return result

    def num_cached(self, tokens: Tokens, salt: str = "", adapter: str = "") -> int:
        return self.manager.lookup_prefix("model", salt, adapter, int32s(tokens))[0].num_cached
