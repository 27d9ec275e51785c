"""Runs every kernel once on a tiny pool: compiles it, or loads it from numba's cache."""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from memory_manager.config import MemoryConfig
from memory_manager.draft_index import DraftIndex
from memory_manager.engine_pool import EnginePool
from memory_manager.inspection import inspect_blocks
from memory_manager.integrity import check_pool, subject_of
from memory_manager.repair import repair_pool
from memory_manager.requests import Acquire, Advance, Fork, Release, Room, Truncate, UpdateRequest


@cache
def warm_up() -> None:
    """Once per process."""
    engine = EnginePool("warm-up", 1, 64, "", bytes(64), MemoryConfig(), DraftIndex(1024))
    for op_seq, lists in enumerate(_LISTS, start=1):
        engine.update(UpdateRequest(1, op_seq, **lists), now_us=0)
    engine.pins.add(1, "", ("", ""), _PROMPT, 0, 0)
    engine.pins.remove(1)
    inspect_blocks(engine)
    check_pool(subject_of(engine))
    repair_pool(subject_of(engine))
    engine.clear(lambda namespace: True)


def _int32s(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


_PROMPT = np.arange(160, dtype=np.int32)
_ONE = np.array([1])
_ONE32 = _int32s(1)
_LISTS: list[dict[str, Any]] = [
    {"acquires": (Acquire(1, _PROMPT), Acquire(2, _PROMPT))},  # the second waits
    {
        "advance": Advance(_ONE, _int32s(0), _int32s(), _int32s(160)),  # and is woken
        "truncate": Truncate(_ONE, _int32s(10)),
        "release": Release(np.array([9])),
        "fork": Fork(_ONE, np.array([3])),
        "room": Room(_ONE, _int32s(20)),
    },
    {"acquires": tuple(Acquire(i, _int32s(i)) for i in range(4, 30))},  # more rows are needed
    {
        "release": Release(np.array([3])),
        "advance": Advance(_ONE, _int32s(0), _int32s(), _int32s(160), _ONE32),
    },
]
