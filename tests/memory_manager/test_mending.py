"""Accounts that drift: noticed, quarantined, mended; the manager goes on."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from memory_manager import JournalConfig, MemoryConfig, MemoryManager, PreconditionError, check_pool
from memory_manager.core.layout import FREE, READY, Pool
from tests.memory_manager.engine_side import Clock, EngineSide


def lively() -> EngineSide:
    """Cached, held, private, fenced, waited for, pinned: something of everything."""
    engine = EngineSide(num_blocks=64)
    engine.finish(1, range(100), tenant="a")
    engine.finish(2, [*range(64), *range(300, 340)], tenant="b")
    engine.acquire(3, range(120), tenant="a")
    engine.acquire(4, range(900, 1100), salt="s")
    engine.acquire(5, range(900, 1100), salt="s")
    engine.manager.pin_prefix("engine", "a", "", "", np.arange(64, dtype=np.int32), 10**6)
    engine.acquire(6, range(2000, 2040))
    engine.launched = 1
    engine.release(6)
    return engine


def pool_of(engine: EngineSide) -> Pool:
    (found,) = engine.manager._state.engines.values()
    return found.tables.pool


def first(pool: Pool, state: int) -> int:
    return int(np.flatnonzero(pool.state == state)[0])


def two_places(pool: Pool) -> None:
    pool.free_list[0] = pool.free_list[1]


def lost(pool: Pool) -> None:
    pool.state[first(pool, FREE)] = READY


def free_and_used(pool: Pool) -> None:
    pool.free_list[0] = first(pool, READY)


def other_tokens(pool: Pool) -> None:
    pool.tokens[16 * first(pool, READY) + 3] += 1


def a_counter(pool: Pool) -> None:
    pool.counters["num_ready"] += 3


def references(pool: Pool) -> None:
    pool.nodes["refs"][first(pool, READY)] += 1


def an_edge(pool: Pool) -> None:
    pool.edges["block"][np.flatnonzero(pool.edges["block"] >= 0)[0]] = -1


def an_order(pool: Pool) -> None:
    pool.tenants["oldest"][:] = -1


@pytest.mark.parametrize(
    "damage",
    [two_places, lost, free_and_used, other_tokens, a_counter, references, an_edge, an_order],
)
def test_damage_is_noticed_and_mended(damage: Callable[[Pool], None]) -> None:
    engine = lively()
    damage(pool_of(engine))
    assert engine.manager.check_integrity() != []
    mended = engine.manager.mend(engine.epoch)
    assert not mended.has_ended
    stats = engine.manager.stats().engines[0]
    assert stats.num_quarantined == len(mended.quarantined) <= 8
    assert engine.manager.check_integrity() == []
    engine.completed = 1
    answer = engine.write(3, 120)
    assert answer.wake.tolist() == [5]
    assert engine.acquire(7, range(120)).block_table.size == 8
    engine.release(3, 4, 5, 7)
    assert engine.acquire(8, range(5000, 5300)).block_table.size == 19


def test_a_sound_pool_is_left_as_it_is() -> None:
    engine = lively()
    before = engine.manager.inspect_blocks()
    assert engine.manager.mend(engine.epoch).quarantined == []
    after = engine.manager.inspect_blocks()
    for name in ("states", "num_users", "depths", "owners", "parents"):
        assert np.array_equal(getattr(before, name), getattr(after, name)), name


def test_what_cannot_be_mended_ends() -> None:
    engine = lively()
    pool = pool_of(engine)
    pool.sequences["num_tokens"][np.flatnonzero(pool.sequences["sequence_id"])[0]] = 10**6
    assert engine.manager.mend(engine.epoch).has_ended
    with pytest.raises(PreconditionError):
        engine.call()


def test_copies_can_be_examined_while_the_pool_goes_on() -> None:
    engine = lively()
    (copy,) = engine.manager.copies_to_check().values()
    engine.release(3, 4)
    assert check_pool(copy) == []
    copy.pool.counters["num_free"] += 1
    assert check_pool(copy) != []
    assert engine.manager.check_integrity() == []


def test_a_mended_pool_is_what_the_journal_holds(tmp_path: Path) -> None:
    config = MemoryConfig(journal=JournalConfig(tmp_path))
    engine = EngineSide(manager=MemoryManager(config, Clock()))
    engine.finish(1, range(100))
    a_counter(pool_of(engine))
    engine.manager.mend(engine.epoch)
    engine.manager.close()
    again = MemoryManager(config, Clock())
    assert again.check_integrity() == []
    assert again.stats().engines[0].num_ready == 6
    again.close()
