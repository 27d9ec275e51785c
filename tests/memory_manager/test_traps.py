"""Traps that memory managers have fallen into, each as a test."""

from pathlib import Path

import numpy as np
import pytest

from memory_manager import (
    Acquire,
    AcquireStatus,
    Advance,
    AllRemoved,
    InvalidRequestError,
    JournalConfig,
    MemoryConfig,
    MemoryManager,
    Release,
    TenantLimits,
)
from memory_manager.core.layout import READY
from tests.memory_manager.engine_side import Clock, EngineSide, int32s, int64s

GRANTED, WAIT, SHORT = AcquireStatus.GRANTED, AcquireStatus.WAIT, AcquireStatus.SHORT


def test_a_block_is_not_shared_before_its_kv_is_written() -> None:
    engine = EngineSide()
    engine.acquire(1, range(100))
    assert engine.num_cached(range(100)) == 0
    engine.write(1, 31)
    assert engine.num_cached(range(100)) == 16
    engine.write(1, 32)
    assert engine.num_cached(range(100)) == 32


def test_a_hit_in_the_same_step_does_not_read_what_is_not_written() -> None:
    engine = EngineSide(min_wait_blocks=100)
    first, second = engine.acquire_together(Acquire(1, int32s(range(100))), Acquire(2, int32s(range(100))))
    assert second.num_cached == 0
    assert not set(first.block_table) & set(second.block_table)


def test_a_block_freed_while_a_step_is_in_flight_is_not_handed_out() -> None:
    engine = EngineSide(num_blocks=8)
    table = engine.acquire(1, range(100)).block_table
    engine.launched = 1
    assert engine.release(1).num_fenced == 7
    other = engine.acquire(2, range(500, 516)).block_table
    assert not set(other) & set(table)
    assert engine.acquire(3, range(600, 700)).status is SHORT
    engine.completed = 1
    assert engine.acquire(3, range(600, 700)).status is GRANTED


def test_a_cached_block_whose_last_user_may_still_run_is_not_evicted() -> None:
    engine = EngineSide(num_blocks=4)
    engine.acquire(1, range(64))
    engine.launched = 1
    engine.write(1, 64)
    engine.release(1)
    assert engine.acquire(2, range(100, 164)).status is SHORT
    assert engine.num_cached(range(65)) == 64
    engine.completed = 1
    assert engine.acquire(2, range(100, 164)).status is GRANTED


def test_releasing_the_same_sequence_twice_frees_its_blocks_once() -> None:
    engine = EngineSide(num_blocks=8)
    engine.acquire(1, range(100))
    assert engine.release(1, 1, 1).num_free == 8
    assert engine.release(1).num_free == 8


def test_making_room_does_not_evict_the_prefix_just_matched() -> None:
    engine = EngineSide(num_blocks=8)
    engine.finish(1, range(64))
    engine.finish(2, range(500, 564))
    result = engine.acquire(3, range(100))
    assert result.status is GRANTED
    assert result.num_cached == 64
    assert result.block_table[:4].tolist() == list(range(4))


def test_making_room_for_a_seal_cannot_evict_its_parent() -> None:
    engine = EngineSide(num_blocks=3)
    engine.acquire(1, range(17))
    engine.write(1, 16)
    engine.advance(1, range(17, 32), 31)
    assert engine.acquire(2, range(500, 532)).status is SHORT
    assert engine.room(1, 1).room.num_blocks.tolist() == [1]
    assert engine.write(1, 32).num_free == 0
    assert engine.num_cached(range(33)) == 32


def test_an_evicted_block_is_no_longer_hit() -> None:
    engine = EngineSide(num_blocks=8)
    engine.finish(1, range(128))
    engine.acquire(2, range(500, 628))
    assert engine.num_cached(range(128)) == 0
    engine.release(2)
    assert engine.acquire(3, range(128)).num_cached == 0


def test_a_whole_prompt_is_never_matched() -> None:
    engine = EngineSide()
    engine.finish(1, range(64))
    assert engine.acquire(2, range(64)).num_cached == 48
    assert engine.acquire(3, range(65)).num_cached == 64
    assert engine.num_cached(range(64)) == 48


def test_reserved_slots_for_drafts_are_never_cached() -> None:
    """Drafts are in the pool but not in the memory manager: only final tokens come to it."""
    engine = EngineSide()
    engine.acquire(1, range(20))
    engine.write(1, 20)
    engine.room(1, 100)
    engine.launched = 1
    engine.truncate(1, 2)
    engine.release(1)
    assert engine.manager.stats().engines[0].num_ready == 1


@pytest.mark.parametrize("option", ["salt", "adapter"])
def test_namespaces_share_nothing_and_leak_nothing(option: str) -> None:
    engine = EngineSide(num_blocks=16)
    engine.finish(1, range(64), **{option: "a"})
    assert engine.acquire(2, range(64)).num_cached == 0
    assert engine.acquire(3, range(64), **{option: "b"}).num_cached == 0
    assert engine.num_cached(range(64), **{option: "a"}) == 48
    engine.release(2, 3)
    assert engine.manager.stats().engines[0].num_evictable == 4


def test_the_fields_of_a_namespace_cannot_be_confused() -> None:
    engine = EngineSide()
    engine.finish(1, range(64), salt="ab", adapter="c")
    assert engine.num_cached(range(64), salt="a", adapter="bc") == 0
    assert engine.num_cached(range(64), salt="c", adapter="ab") == 0
    assert engine.num_cached(range(64), salt="ab", adapter="c") == 48


def test_pins_are_released_by_handle_not_by_key() -> None:
    """The same prefix pinned in two namespaces and twice over: each pin ends for itself."""
    engine = EngineSide(num_blocks=32)
    engine.finish(1, range(64), salt="a")
    engine.finish(2, range(64), salt="b")
    pin = engine.manager.pin_prefix
    pins = [pin("engine", "", salt, "", int32s(range(64)), 1000).pin_id for salt in "ab"]
    assert engine.manager.stats().engines[0].num_evictable == 0
    engine.manager.unpin_prefix(pins[0])
    engine.manager.unpin_prefix(pins[0])
    assert engine.manager.stats().engines[0].num_evictable == 4
    engine.manager.unpin_prefix(pins[1])
    assert engine.manager.stats().engines[0].num_evictable == 8
    assert engine.manager.check_integrity() == []


def test_a_flood_of_unique_prompts_does_not_evict_another_tenants_prefix() -> None:
    engine = EngineSide(num_blocks=64)
    engine.finish(1, range(256), tenant="quiet")
    for i in range(40):
        engine.finish(10 + i, range(10_000 + 100 * i, 10_064 + 100 * i), tenant="flood")
    assert engine.num_cached(range(257)) == 256


def test_a_floor_protects_even_an_idle_tenant() -> None:
    engine = EngineSide(num_blocks=16, tenants={"quiet": TenantLimits(floor=4)})
    engine.finish(1, range(128), tenant="quiet")
    result = engine.acquire(2, range(1000, 1000 + 12 * 16), tenant="loud")
    assert result.status is GRANTED
    assert engine.num_cached(range(129)) == 64
    assert engine.acquire(3, range(16), tenant="loud").status is SHORT


def test_a_peer_that_dies_leaves_no_blocks_behind() -> None:
    engine = EngineSide()
    engine.acquire(1, range(100))
    engine.acquire(2, range(100))
    engine.clock.now += 9
    assert engine.manager.reap_expired() == []
    engine.manager.heartbeat(engine.epoch)
    engine.clock.now += 9
    assert engine.manager.reap_expired() == []
    engine.clock.now += 2
    assert engine.manager.reap_expired() == [engine.epoch]
    assert engine.manager.stats().engines == ()


def test_a_leader_that_dies_wakes_its_followers() -> None:
    engine = EngineSide()
    engine.acquire(1, range(160))
    assert engine.acquire(2, range(160)).status is WAIT
    assert engine.release(1).wake.tolist() == [2]
    assert engine.acquire(2, range(160)).status is GRANTED


def test_a_peer_that_dies_after_an_abort_leaves_nothing_behind() -> None:
    engine = EngineSide(num_blocks=16)
    engine.launched = 3
    engine.acquire(1, range(100))
    engine.acquire(2, range(100))
    engine.release(1)  # the abort; its blocks are fenced, its follower is woken
    engine.clock.now += 11
    engine.manager.reap_expired()
    again = EngineSide(num_blocks=16, manager=engine.manager)
    assert again.acquire(1, range(256)).block_table.size == 16


def test_a_manager_that_restarts_does_not_hand_out_live_blocks(tmp_path: Path) -> None:
    config = MemoryConfig(journal=JournalConfig(tmp_path))
    engine = EngineSide(num_blocks=8, manager=MemoryManager(config, Clock()))
    table = engine.acquire(1, range(100)).block_table
    engine.manager.close()
    engine.manager = MemoryManager(config, Clock())
    assert engine.acquire(2, range(500, 516)).block_table.tolist() == [7]
    assert engine.acquire(3, range(600, 616)).status is SHORT
    assert engine.release(1, 2).num_free == 8
    assert set(table) == set(range(7))


def test_a_block_sealed_and_evicted_in_one_call_leaves_no_trace() -> None:
    """Removed before registered: neither a lookup nor an event may show it."""
    engine = EngineSide(num_blocks=4)
    engine.manager.events(0)
    engine.acquire(1, range(64))
    answer = engine.call(
        advance=Advance(int64s([1]), int32s([0]), int32s([]), int32s([64])),
        release=Release(int64s([1])),
        acquires=(Acquire(2, int32s(range(500, 564))),),
    )
    assert answer.acquires[0].status is GRANTED
    assert engine.num_cached(range(65)) == 0
    assert [event.change for event in engine.manager.events(0)] == [AllRemoved()]


def test_counters_that_drift_are_noticed() -> None:
    engine = EngineSide()
    engine.finish(1, range(64))
    pool = _pool(engine.manager)
    pool.counters["num_ready"] += 1
    assert any("num_ready" in violation for violation in engine.manager.check_integrity())


def test_a_block_in_two_places_is_noticed() -> None:
    engine = EngineSide()
    engine.acquire(1, range(64))
    pool = _pool(engine.manager)
    pool.free_list[0] = 0
    assert engine.manager.check_integrity() != []


def test_wrong_tokens_in_the_trie_are_noticed() -> None:
    engine = EngineSide()
    engine.finish(1, range(64))
    pool = _pool(engine.manager)
    pool.tokens[16 * int(np.flatnonzero(pool.state == READY)[2])] += 1
    assert engine.manager.check_integrity() != []


def test_a_rejected_call_changes_nothing() -> None:
    engine = EngineSide()
    engine.acquire(1, range(20))
    before = [array.copy() for array in _pool(engine.manager)]
    with pytest.raises(InvalidRequestError, match="NO_ROOM"):
        engine.advance(1, range(20, 60), 20)
    after = _pool(engine.manager)
    names = [name for name in after._fields if name not in ("counters", "sequences")]
    for name, array in zip(after._fields, before, strict=True):
        if name in names:
            assert np.array_equal(getattr(after, name), array), name
    assert engine.advance(1, range(20, 25), 20).num_free == 62


def _pool(manager: MemoryManager):  # type: ignore[no-untyped-def]
    (engine,) = manager._state.engines.values()
    return engine.tables.pool
