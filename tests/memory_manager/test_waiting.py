"""Cold-prefix coalescing: what is being computed already is not computed again."""

from memory_manager import Acquire, AcquireStatus
from tests.memory_manager.engine_side import EngineSide, int32s

GRANTED, WAIT, SHORT = AcquireStatus.GRANTED, AcquireStatus.WAIT, AcquireStatus.SHORT
PREFIX = [*range(320)]


def test_sixteen_requests_compute_a_cold_prefix_once() -> None:
    engine = EngineSide()
    prompts = {i: PREFIX + [1000 + i] * 8 for i in range(1, 17)}
    results = engine.acquire_together(*(Acquire(i, int32s(p)) for i, p in prompts.items()))
    assert [result.status for result in results] == [GRANTED] + [WAIT] * 15
    assert engine.manager.stats().engines[0].num_waiting == 15
    wake = engine.write(1, 328).wake.tolist()
    assert wake == [*range(2, 17)]
    results = engine.acquire_together(*(Acquire(i, int32s(prompts[i])) for i in wake))
    assert {result.num_cached for result in results} == {320}
    stats = engine.manager.stats().engines[0]
    assert stats.num_coalesced_tokens == 15 * 320
    assert stats.num_private + stats.num_ready == 20 + 16


def test_followers_wake_when_the_common_part_is_sealed() -> None:
    engine = EngineSide()
    engine.acquire(1, PREFIX)
    assert engine.acquire(2, PREFIX[:160] + [7] * 50).status is WAIT
    assert engine.write(1, 159).wake.size == 0
    assert engine.write(1, 160).wake.tolist() == [2]
    assert engine.acquire(2, PREFIX[:160] + [7] * 50).num_cached == 160


def test_a_short_overlap_is_not_worth_waiting_for() -> None:
    engine = EngineSide(min_wait_blocks=4)
    engine.acquire(1, PREFIX)
    assert engine.acquire(2, PREFIX[:48] + [7] * 100).status is GRANTED
    assert engine.acquire(3, PREFIX[:64] + [7] * 100).status is WAIT


def test_when_the_leader_is_preempted_it_leads_again_by_being_first() -> None:
    engine = EngineSide()
    engine.acquire(1, PREFIX)
    engine.write(1, 64)
    assert engine.acquire(2, PREFIX).status is WAIT
    assert engine.acquire(3, PREFIX).status is WAIT
    assert engine.release(1).wake.tolist() == [2, 3]
    leader, *followers = engine.acquire_together(*(Acquire(i, int32s(PREFIX)) for i in (10, 2, 3)))
    assert (leader.status, leader.num_cached) == (GRANTED, 64)
    assert [follower.status for follower in followers] == [WAIT, WAIT]


def test_one_who_gives_up_waits_no_more() -> None:
    engine = EngineSide()
    engine.acquire(1, PREFIX)
    engine.acquire(2, PREFIX)
    engine.release(2)
    assert engine.manager.stats().engines[0].num_waiting == 0
    assert engine.write(1, 320).wake.size == 0


def test_asking_again_before_being_woken_waits_once() -> None:
    engine = EngineSide()
    engine.acquire(1, PREFIX)
    assert engine.acquire(2, PREFIX).status is WAIT
    assert engine.acquire(2, PREFIX).status is WAIT
    assert engine.write(1, 320).wake.tolist() == [2]


def test_other_namespaces_do_not_wait_for_each_other() -> None:
    engine = EngineSide()
    engine.acquire(1, PREFIX, salt="a")
    assert engine.acquire(2, PREFIX, salt="b").status is GRANTED


def test_a_second_one_that_overtakes_becomes_the_one_to_share_with() -> None:
    """Two compute the same blocks (neither waited); the second seals first."""
    engine = EngineSide(min_wait_blocks=100)
    engine.acquire(1, PREFIX)
    engine.acquire(2, PREFIX[:64] + [9] * 64)
    assert engine.write(2, 64).advance.replaced_blocks.size == 0
    answer = engine.write(1, 64)
    assert answer.advance.replaced_indices.tolist() == [0, 1, 2, 3]
    assert engine.num_cached(PREFIX) == 64


def test_the_end_of_the_cache_wakes_those_who_wait() -> None:
    engine = EngineSide()
    engine.acquire(1, PREFIX)
    engine.acquire(2, PREFIX)
    engine.manager.clear_cache()
    assert engine.call().wake.tolist() == [2]
    assert engine.acquire(2, PREFIX).status is GRANTED


def test_waiting_allocates_nothing() -> None:
    engine = EngineSide(num_blocks=24)
    engine.acquire(1, PREFIX)
    free = engine.manager.stats().engines[0].num_free
    engine.acquire(2, PREFIX + [1] * 20)
    assert engine.manager.stats().engines[0].num_free == free
