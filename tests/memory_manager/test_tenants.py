"""Who pays, who gives first, who keeps what."""

import pytest

from memory_manager import AcquireStatus, ExhaustedError, InvalidRequestError, NotFoundError, TenantLimits
from tests.memory_manager.engine_side import EngineSide, int32s

GRANTED, SHORT, NEVER = AcquireStatus.GRANTED, AcquireStatus.SHORT, AcquireStatus.NEVER


def tenant(engine: EngineSide, name: str) -> int:
    """Blocks charged to a tenant."""
    (found,) = [t for t in engine.manager.stats().engines[0].tenants if t.tenant == name]
    return found.num_blocks


def test_a_block_is_charged_to_whom_sealed_it_until_it_is_evicted() -> None:
    engine = EngineSide(num_blocks=8)
    engine.finish(1, range(48), tenant="a")
    engine.acquire(2, range(64), tenant="b")
    assert (tenant(engine, "a"), tenant(engine, "b")) == (3, 1)
    engine.release(2)
    engine.acquire(3, range(100, 228), tenant="b")
    assert (tenant(engine, "a"), tenant(engine, "b")) == (0, 8)


def test_at_its_quota_a_tenants_own_oldest_blocks_go_first() -> None:
    engine = EngineSide(num_blocks=32, tenants={"a": TenantLimits(quota=6)})
    engine.finish(1, range(64), tenant="a")
    engine.finish(2, range(100, 132), tenant="a")
    assert engine.acquire(3, range(200, 232), tenant="a").status is GRANTED
    assert engine.num_cached(range(65)) == 32
    assert engine.num_cached(range(100, 133)) == 32
    assert tenant(engine, "a") == 6


def test_with_none_left_it_is_short_although_the_pool_is_not() -> None:
    engine = EngineSide(num_blocks=32, tenants={"a": TenantLimits(quota=6)})
    engine.acquire(1, range(64), tenant="a")
    assert engine.acquire(2, range(100, 164), tenant="a").status is SHORT
    assert engine.room(1, 100).room.num_blocks.tolist() == [2]
    assert engine.acquire(3, range(112), tenant="a").status is NEVER
    assert engine.acquire(4, range(500, 612), tenant="b").status is GRANTED


def test_tenants_above_their_share_give_first() -> None:
    engine = EngineSide(num_blocks=12)
    engine.finish(1, range(32), tenant="small")
    engine.finish(2, range(100, 260), tenant="large")
    engine.acquire(3, range(500, 532), tenant="new")
    assert engine.num_cached(range(33)) == 32
    assert tenant(engine, "large") == 8


def test_among_equals_the_least_recently_used_goes() -> None:
    engine = EngineSide(num_blocks=4)
    engine.finish(1, range(32), tenant="a")
    engine.finish(2, range(100, 132), tenant="b")
    engine.finish(3, range(33), tenant="a")
    engine.acquire(4, range(500, 516), tenant="c")
    assert engine.num_cached(range(33)) == 32
    assert engine.num_cached(range(100, 133)) == 16


def test_floors_beyond_the_pool_are_refused_at_the_start() -> None:
    limits = {"a": TenantLimits(floor=5), "b": TenantLimits(floor=4)}
    with pytest.raises(InvalidRequestError) as refused:
        EngineSide(num_blocks=8, tenants=limits)
    assert refused.value.reason == "BAD_POOL_SIZE"
    EngineSide(num_blocks=9, tenants=limits)


def test_a_floor_does_not_protect_from_oneself() -> None:
    engine = EngineSide(num_blocks=8, tenants={"a": TenantLimits(floor=8)})
    engine.finish(1, range(128), tenant="a")
    assert engine.acquire(2, range(500, 516), tenant="b").status is SHORT
    assert engine.acquire(3, range(500, 516), tenant="a").status is GRANTED


def test_pins_keep_blocks_from_being_evicted() -> None:
    engine = EngineSide(num_blocks=8)
    engine.finish(1, range(32))
    pin = engine.manager.pin_prefix("engine", "", "", "", int32s(range(40)), ttl_ms=5000)
    assert pin.num_tokens == 32
    assert engine.acquire(2, range(100, 212)).status is SHORT
    assert engine.num_cached(range(33)) == 32
    engine.clock.now += 5
    engine.manager.reap_expired()
    assert engine.acquire(2, range(100, 212)).status is GRANTED


def test_pins_have_a_cap_per_tenant() -> None:
    engine = EngineSide(num_blocks=32, tenants={"a": TenantLimits(pin_cap=3)})
    engine.finish(1, range(64))
    pin = engine.manager.pin_prefix
    with pytest.raises(ExhaustedError) as refused:
        pin("engine", "a", "", "", int32s(range(64)), 1000)
    assert refused.value.reason == "PIN_CAP"
    first = pin("engine", "a", "", "", int32s(range(40)), 1000)
    with pytest.raises(ExhaustedError):
        pin("engine", "a", "", "", int32s(range(32)), 1000)
    engine.manager.unpin_prefix(first.pin_id)
    pin("engine", "a", "", "", int32s(range(48)), 1000)
    assert engine.manager.stats().engines[0].tenants[-1].num_pinned == 3
    assert engine.manager.check_integrity() == []


def test_only_what_is_cached_can_be_pinned() -> None:
    engine = EngineSide()
    engine.acquire(1, range(40))
    for tokens in (range(40), range(10), range(0)):
        with pytest.raises(NotFoundError) as refused:
            engine.manager.pin_prefix("engine", "", "", "", int32s(tokens), 1000)
        assert refused.value.reason == "NOT_CACHED"
    with pytest.raises(InvalidRequestError):
        engine.manager.pin_prefix("engine", "", "", "", int32s(range(40)), 0)
    with pytest.raises(NotFoundError) as refused:
        engine.manager.pin_prefix("nobody", "", "", "", int32s(range(40)), 1000)
    assert refused.value.reason == "UNKNOWN_ENGINE"
    engine.manager.unpin_prefix(12345)


def test_clearing_frees_what_is_idle_and_detaches_what_is_held() -> None:
    engine = EngineSide(num_blocks=16)
    engine.finish(1, range(64))
    engine.finish(2, range(100, 132))
    engine.acquire(3, range(40))
    cleared = engine.manager.clear_cache()
    assert (cleared.num_freed, cleared.num_detached) == (4, 2)
    assert engine.num_cached(range(64)) == 0
    assert engine.manager.check_integrity() == []
    engine.write(3, 40)
    engine.room(3, 40)
    engine.advance(3, range(40, 60), 60)
    assert engine.num_cached(range(64)) == 0
    engine.fork(3, 4)
    assert engine.release(3, 4).num_free == 16


def test_one_salt_can_be_cleared_alone() -> None:
    engine = EngineSide()
    engine.finish(1, range(64), salt="a")
    engine.finish(2, range(64), salt="a", adapter="x")
    engine.finish(3, range(64), salt="b")
    assert engine.manager.clear_cache(salt="a").num_freed == 8
    assert engine.num_cached(range(64), salt="a") == 0
    assert engine.num_cached(range(64), salt="b") == 48


def test_clearing_ends_pins() -> None:
    engine = EngineSide()
    engine.finish(1, range(64))
    pin = engine.manager.pin_prefix("engine", "", "", "", int32s(range(64)), 1000)
    assert engine.manager.clear_cache("engine").num_freed == 4
    engine.manager.unpin_prefix(pin.pin_id)
    assert engine.manager.check_integrity() == []


def test_idle_names_make_room_for_new_ones() -> None:
    engine = EngineSide(num_blocks=64)
    engine.acquire(1, range(40), tenant="old", salt="old")
    for i in range(300):
        engine.finish(10 + i, range(20), tenant=f"t{i}", salt=f"s{i}")
    (pool,) = engine.manager._state.engines.values()
    assert pool.tables.pool.tenants.size < 300
    assert pool.tables.pool.roots.size < 300
    engine.write(1, 40)
    assert engine.num_cached(range(40), salt="old") == 32


def test_hundreds_of_sequences_at_once() -> None:
    engine = EngineSide(num_blocks=2000)
    for i in range(1, 601):
        engine.acquire(i, range(i * 50, i * 50 + 20))
    assert engine.manager.stats().engines[0].num_sequences == 600
    assert engine.release(*range(1, 601)).num_free == 2000
