"""Runs every entry point of the core once on a tiny pool: compiles it, or loads it from numba's cache."""

import numpy as np

from memory_manager.config import MemoryConfig
from memory_manager.engine_pool import EnginePool
from memory_manager.inspection import inspect_blocks
from memory_manager.integrity import check_pool, subject_of
from memory_manager.repair import repair_pool
from memory_manager.requests import Acquire, Advance, Fork, Release, Room, Truncate, UpdateRequest


def warm_up(config: MemoryConfig) -> None:
    engine = EnginePool("warm-up", 1, 64, "", bytes(64), config)
    tokens = np.arange(40 * 16, dtype=np.int32)
    one = np.array([1])
    engine.update(
        UpdateRequest(
            1, 1, acquires=(Acquire(1, tokens[:400].copy()), Acquire(2, tokens.copy()), Acquire(3, tokens))
        ),
        now_us=0,
    )
    engine.update(
        UpdateRequest(
            epoch=1,
            op_seq=2,
            advance=Advance(one, _int32s(0), _int32s(), _int32s(400)),
            truncate=Truncate(one, _int32s(25)),
            release=Release(np.array([2])),
            fork=Fork(one, np.array([4])),
            room=Room(one, _int32s(20)),
        ),
        now_us=0,
    )
    engine.pins.add(1, "", ("", ""), tokens[:64].copy(), 0, 0)
    engine.pins.remove(1)
    engine.clear(lambda namespace: True)
    inspect_blocks(engine)
    check_pool(subject_of(engine))
    repair_pool(subject_of(engine))


def _int32s(*values: int) -> "np.typing.NDArray[np.int32]":
    return np.array(values, np.int32)
