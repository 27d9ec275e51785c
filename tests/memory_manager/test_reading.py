"""What can be read of the state: explanations, events, pictures of the blocks."""

import threading

import numpy as np
import pytest

from memory_manager import (
    AllRemoved,
    Event,
    EvictionCause,
    MissReason,
    NotFoundError,
    OutOfRangeError,
    Removed,
    Stored,
    TenantLimits,
    delta_between,
)
from tests.memory_manager.engine_side import EngineSide


def test_a_miss_of_something_new() -> None:
    engine = EngineSide()
    engine.finish(1, range(64))
    engine.acquire(2, [*range(48), *range(900, 950)])
    explained = engine.manager.explain("engine", 2)
    assert (explained.num_tokens, explained.num_cached, explained.missed_at_block) == (98, 48, 3)
    assert explained.reason is MissReason.NEVER_SEEN


def test_a_full_hit_has_nothing_to_explain() -> None:
    engine = EngineSide()
    engine.finish(1, range(64))
    engine.acquire(2, range(64))
    assert engine.manager.explain("engine", 2).reason is MissReason.NONE


@pytest.mark.parametrize(
    ("tenants", "asking", "cause"),
    [
        ({}, "a", EvictionCause.OWN_PRESSURE),
        ({}, "b", EvictionCause.SHARED_PRESSURE),
        ({"a": TenantLimits(quota=4)}, "a", EvictionCause.QUOTA),
    ],
)
def test_a_miss_of_something_evicted(
    tenants: dict[str, TenantLimits], asking: str, cause: EvictionCause
) -> None:
    engine = EngineSide(num_blocks=4, tenants=tenants)
    engine.finish(1, range(64), tenant="a")
    engine.finish(2, range(500, 564), tenant=asking)
    engine.clock.now += 7.5
    engine.finish(3, range(64), tenant="a")
    explained = engine.manager.explain("engine", 3)
    assert (explained.reason, explained.eviction_cause) == (MissReason.EVICTED, cause)
    assert explained.evicted_seconds_ago == pytest.approx(7.5)
    assert (explained.missed_at_block, explained.num_more_blocks) == (0, 2)
    assert explained.evicted_for_tenant == ("a" if asking == "a" else None)
    assert engine.manager.explain("engine", 3, administrator=True).evicted_for_tenant == asking


def test_a_prompt_shorter_than_a_block() -> None:
    engine = EngineSide()
    engine.finish(1, range(16))
    engine.acquire(2, range(16))  # the last token is always computed
    assert engine.manager.explain("engine", 2).reason is MissReason.SHORTER_THAN_BLOCK


def test_a_request_that_asked_for_nothing_cached() -> None:
    engine = EngineSide()
    engine.finish(1, range(64))
    engine.acquire(2, range(64), match_prefix=False)
    assert engine.manager.explain("engine", 2).reason is MissReason.NOT_ASKED


def test_a_miss_of_something_still_pending() -> None:
    engine = EngineSide(min_wait_blocks=10)
    engine.acquire(1, range(600, 700))
    engine.acquire(2, range(600, 700))
    explained = engine.manager.explain("engine", 2)
    assert (explained.reason, explained.num_more_blocks) == (MissReason.PENDING, 5)


def test_a_miss_of_something_purged() -> None:
    engine = EngineSide()
    engine.finish(1, range(64))
    engine.manager.clear_cache()
    engine.acquire(2, range(64))
    explained = engine.manager.explain("engine", 2)
    assert (explained.reason, explained.eviction_cause) == (MissReason.PURGED, None)


def test_only_what_is_known_is_explained() -> None:
    with pytest.raises(NotFoundError) as refused:
        EngineSide().manager.explain("engine", 99)
    assert refused.value.reason == "UNKNOWN_SEQUENCE"


def test_events_tell_what_is_cached() -> None:
    engine = EngineSide(num_blocks=8)
    assert [event.change for event in engine.manager.events(0)] == [AllRemoved()]
    engine.finish(1, range(40))
    nothing, everything = engine.manager.events(0)
    assert nothing == Event(everything.seq, "engine", AllRemoved())
    stored = everything.change
    assert isinstance(stored, Stored)
    assert stored.tokens.tolist() == [*range(32)]
    assert stored.parent_block is None
    engine.finish(2, [*range(32), *range(70, 90)])
    engine.finish(3, range(500, 600))
    changes = [event.change for event in engine.manager.events(everything.seq)]
    assert isinstance(changes[0], Stored)
    assert changes[0].parent_block == stored.blocks[-1]
    assert isinstance(changes[1], Removed)
    assert isinstance(changes[2], Stored)
    assert changes[2].blocks.size == 6


def test_a_mirror_of_the_events_equals_the_cache() -> None:
    engine = EngineSide(num_blocks=24)
    rng = np.random.default_rng(0)
    mirror: dict[int, list[int]] = {}
    seen = 0
    engine.manager.events(0)
    for i in range(1, 60):
        engine.finish(i, rng.integers(0, 2, 60).repeat(16)[: int(rng.integers(1, 200))].tolist())
        if i == 40:
            engine.manager.clear_cache()
        for event in engine.manager.events(seen):
            seen = event.seq
            match event.change:
                case Stored(blocks, tokens, _):
                    for block, row in zip(blocks.tolist(), tokens.reshape(-1, 16).tolist(), strict=True):
                        mirror[block] = row
                case Removed(blocks):
                    for block in blocks.tolist():
                        del mirror[block]
                case AllRemoved():
                    mirror.clear()
    (pool,) = engine.manager._state.engines.values()
    cached = np.flatnonzero(engine.manager.inspect_blocks().states == 2).tolist()
    tokens = pool.tables.pool.tokens.reshape(-1, 16)
    assert mirror == {block: tokens[block].tolist() for block in cached}


def test_events_that_are_gone_are_not_made_up() -> None:
    engine = EngineSide()
    (nothing,) = engine.manager.events(0)
    engine.finish(1, range(40))
    (stored,) = engine.manager.events(nothing.seq)
    assert stored.seq > nothing.seq > 0
    assert engine.manager.events(stored.seq) == []
    with pytest.raises(OutOfRangeError) as refused:
        engine.manager.events(stored.seq + 1)
    assert refused.value.reason == "EVENTS_DROPPED"


def test_numbers_of_an_earlier_start_are_gone() -> None:
    earlier, later = EngineSide(), EngineSide()
    (nothing,) = earlier.manager.events(0)
    for manager_is_asked_before in (False, True):
        if manager_is_asked_before:
            later.manager.events(0)
            later.finish(1, range(40))
        with pytest.raises(OutOfRangeError):
            later.manager.events(nothing.seq)


def test_an_engine_that_ends_removes_everything() -> None:
    engine = EngineSide()
    (nothing,) = engine.manager.events(0)
    engine.finish(1, range(40))
    engine.manager.register_engine("engine", 64, 16, "model")
    assert engine.manager.events(nothing.seq)[-1].change == AllRemoved()


def test_pictures_show_states_users_depths_parents_and_owners() -> None:
    engine = EngineSide(num_blocks=8)
    table = engine.acquire(1, range(40), tenant="a").block_table.tolist()
    engine.write(1, 40)
    engine.acquire(2, range(40), tenant="b")
    picture = engine.manager.inspect_blocks("engine")
    assert picture.states.tolist() == [2, 2, 1, 1, 0, 0, 0, 0]
    assert picture.num_users[table].tolist() == [2, 2, 1]
    assert picture.depths[table].tolist() == [1, 2, 0]
    assert picture.parents[table].tolist() == [-1, table[0], -1]
    assert [picture.tenants[i] for i in picture.owners[:4]] == ["a", "a", "a", "b"]
    assert picture.owners[4:].tolist() == [-1] * 4


def test_deltas_lead_from_one_picture_to_the_next() -> None:
    engine = EngineSide(num_blocks=16)
    engine.acquire(1, range(40))
    old = engine.manager.inspect_blocks()
    engine.write(1, 40)
    engine.acquire(2, range(50))
    new = engine.manager.inspect_blocks()
    delta = delta_between(old, new)
    assert delta is not None
    assert delta.to_seq > delta.from_seq == old.snapshot_seq
    for name in ("states", "num_users", "depths", "owners"):
        column = getattr(old, name).copy()
        column[delta.blocks] = getattr(delta, name)
        assert column.tolist() == getattr(new, name).tolist()
    assert delta.blocks.size < 8
    engine.acquire(3, range(5), tenant="somebody new")
    assert delta_between(new, engine.manager.inspect_blocks()) is None


def test_another_thread_may_read_while_updates_run() -> None:
    engine = EngineSide(num_blocks=256)
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                picture = engine.manager.inspect_blocks()
                assert set(picture.states.tolist()) <= {0, 1, 2, 3}
                assert int(picture.num_users.max()) <= 256
        except BaseException as failure:
            failures.append(failure)

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(1, 300):
        engine.finish(i, range(i % 7 * 100, i % 7 * 100 + 90), tenant=f"t{i}")
    for i in range(300, 500):
        engine.acquire(i, [i])  # tables grow
    stop.set()
    reader.join()
    assert failures == []
