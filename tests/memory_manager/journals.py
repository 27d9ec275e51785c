"""Journals in tests: opened, copied as a killed manager leaves them, compared."""

import random
import shutil
from pathlib import Path

import numpy as np

from memory_manager import (
    JournalConfig,
    MemoryConfig,
    MemoryManager,
    TenantLimits,
)
from memory_manager.core.drafts import texts_of
from memory_manager.core.layout import Array
from tests.memory_manager.engine_side import Clock
from tests.memory_manager.random_calls import MIXES, RandomCalls
from tests.memory_manager.side_by_side import DRAFT_INDEX_TOKENS, SideBySide

TENANTS = {"a": TenantLimits(quota=20), "b": TenantLimits(floor=6)}


def open_at(directory: Path, **options: object) -> MemoryManager:
    journal = JournalConfig(directory, **options)  # type: ignore[arg-type]
    config = MemoryConfig(
        tenants=TENANTS, min_wait_blocks=2, journal=journal, draft_index_tokens=DRAFT_INDEX_TOKENS
    )
    return MemoryManager(config, Clock())


def killed_copy(directory: Path, into: Path) -> Path:
    """What a killed manager leaves behind."""
    shutil.copytree(directory, into)
    return into


def newest(directory: Path) -> Path:
    return max(directory.glob("journal-*.log"))


def assert_same_state(left: MemoryManager, right: MemoryManager) -> None:
    assert left.check_integrity() == right.check_integrity() == []
    assert left._state.engines.keys() == right._state.engines.keys()
    texts = [
        {namespace: texts_of(ring).tolist() for namespace, ring in manager._state.drafts.rings.items()}
        for manager in (left, right)
    ]
    assert list(texts[0].items()) == list(texts[1].items())
    for epoch, engine in left._state.engines.items():
        twin = right._state.engines[epoch]
        for name, array in engine.tables.pool._asdict().items():
            other = getattr(twin.tables.pool, name)
            assert np.array_equal(without_scratch(array), without_scratch(other)), name
        assert engine.tables.tenants.rows == twin.tables.tenants.rows
        assert engine.tables.namespaces.rows == twin.tables.namespaces.rows
        assert engine.last_call.digest == twin.last_call.digest
        assert [entry[:-1] for entry in engine.pins.entries.values()] == [
            entry[:-1] for entry in twin.pins.entries.values()
        ]


def without_scratch(array: Array) -> Array:
    """What only a call in progress uses; rejected calls, which are not recorded, touch it too."""
    array = array.copy()
    for field in ("mark", "checked_tokens", "checked_blocks", "calls", "now_us"):
        if field in (array.dtype.names or ()):
            array[field] = 0
    return array


def random_life(directory: Path, seed: int, num_operations: int = 400) -> SideBySide:
    """A manager that has been used, and its model."""
    both = SideBySide(64, TENANTS, manager=open_at(directory))
    calls = RandomCalls(both, seed, ["a", "b", "c"], [("", ""), ("salt", "")])
    rng = random.Random(seed)
    done = 0
    while done < num_operations:
        done += calls.run(rng.choice(MIXES), 50)
    return both
