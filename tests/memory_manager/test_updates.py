"""One call after the other: order of the lists, fences, idempotence."""

import numpy as np
import pytest

from memory_manager import (
    Acquire,
    AcquireStatus,
    Advance,
    Fork,
    InvalidRequestError,
    Release,
    Room,
    UpdateRequest,
)
from tests.memory_manager.engine_side import EngineSide, int32s, int64s

ONE = int64s([1])


def test_the_same_call_again_is_answered_the_same_and_changes_nothing() -> None:
    engine = EngineSide()
    request = UpdateRequest(engine.epoch, 1, acquires=(Acquire(1, int32s(range(50))),))
    answer = engine.manager.update_sequences(request)
    equal = UpdateRequest(engine.epoch, 1, acquires=(Acquire(1, int32s(range(50))),))
    assert engine.manager.update_sequences(equal) is answer
    assert engine.manager.stats().engines[0].num_private == 4


def test_arrays_of_a_request_are_read_only_afterwards() -> None:
    engine = EngineSide()
    tokens = int32s(range(20))
    engine.call(acquires=(Acquire(1, tokens),))
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 5


def test_what_a_call_releases_serves_its_own_acquires() -> None:
    engine = EngineSide(num_blocks=4)
    engine.acquire(1, range(64))
    answer = engine.call(release=Release(ONE), acquires=(Acquire(2, int32s(range(100, 164))),))
    assert answer.acquires[0].status is AcquireStatus.GRANTED


def test_a_sequence_that_finishes_is_sealed_by_the_call_that_releases_it() -> None:
    engine = EngineSide()
    engine.acquire(1, range(30))
    engine.call(
        advance=Advance(ONE, int32s([2]), int32s([30, 31]), int32s([32])),
        release=Release(ONE),
    )
    assert engine.num_cached(range(33)) == 32


def test_an_id_released_in_the_same_call_can_be_used_again() -> None:
    engine = EngineSide()
    engine.acquire(1, range(30))
    answer = engine.call(release=Release(ONE), acquires=(Acquire(1, int32s([7])),))
    assert answer.acquires[0].status is AcquireStatus.GRANTED


def test_of_two_equal_blocks_the_first_sealed_wins() -> None:
    engine = EngineSide(min_wait_blocks=100)
    engine.acquire_together(Acquire(1, int32s(range(40))), Acquire(2, int32s(range(40))))
    first = engine.write(2, 40)
    assert first.advance.replaced_blocks.size == 0
    answer = engine.write(1, 40)
    assert answer.advance.replaced_sequence_ids.tolist() == [1, 1]
    assert answer.advance.replaced_indices.tolist() == [0, 1]
    table = engine.manager.inspect_blocks()
    assert table.num_users[answer.advance.replaced_blocks].tolist() == [2, 2]
    assert answer.num_fenced == 2


def test_a_replaced_block_waits_for_the_step_that_the_next_call_names() -> None:
    engine = EngineSide(min_wait_blocks=100)
    engine.acquire_together(Acquire(1, int32s(range(20))), Acquire(2, int32s(range(20))))
    engine.write(1, 20)
    engine.launched = engine.completed = 1
    assert engine.write(2, 20).num_fenced == 1
    engine.launched = 2
    assert engine.call().num_fenced == 1
    engine.launched = 3
    assert engine.call().num_fenced == 1
    engine.completed = 2
    assert engine.call().num_fenced == 0


def test_an_idle_engines_closing_call_leaves_nothing_fenced() -> None:
    engine = EngineSide(min_wait_blocks=100)
    engine.acquire_together(Acquire(1, int32s(range(20))), Acquire(2, int32s(range(20))))
    engine.launched = 5
    engine.write(1, 20)
    engine.write(2, 20)
    assert engine.release(1, 2).num_fenced == 3
    engine.completed = 5
    assert engine.call().num_fenced == 0


def test_written_tokens_may_lag_behind() -> None:
    engine = EngineSide()
    engine.acquire(1, range(40))
    engine.advance(1, range(40, 48), 20)
    assert engine.num_cached(range(48)) == 16
    engine.advance(1, [], 47)
    assert engine.num_cached(range(48)) == 32


def test_room_covers_the_tokens_ahead_and_no_more() -> None:
    engine = EngineSide()
    engine.acquire(1, range(20))
    assert engine.room(1, 12).room.blocks.size == 0
    assert engine.room(1, 13).room.blocks.size == 1
    assert engine.room(1, 13).room.blocks.size == 0
    assert engine.room(1, 60).room.num_blocks.tolist() == [2]


def test_room_is_granted_in_part() -> None:
    engine = EngineSide(num_blocks=4)
    engine.acquire(1, range(20))
    engine.acquire(2, range(16))
    assert engine.room(1, 200).room.num_blocks.tolist() == [1]
    assert engine.room(2, 1).room.num_blocks.tolist() == [0]


def test_truncate_gives_reserve_back() -> None:
    engine = EngineSide(num_blocks=8)
    engine.acquire(1, range(20))
    engine.room(1, 80)
    assert engine.truncate(1, 2).num_free == 6
    assert engine.manager.stats().engines[0].num_truncated_blocks == 5
    engine.advance(1, range(12), 31)
    assert engine.room(1, 1).room.num_blocks.tolist() == [1]


def test_an_acquire_that_can_never_fit_says_so() -> None:
    engine = EngineSide(num_blocks=4)
    result = engine.acquire(1, range(80))
    assert (result.status, result.num_needed, result.num_limit) == (AcquireStatus.NEVER, 5, 4)


def test_a_short_acquire_changes_nothing_and_says_what_it_needs() -> None:
    engine = EngineSide(num_blocks=8)
    engine.finish(1, range(64))
    engine.acquire(2, range(500, 548))
    before = engine.manager.inspect_blocks().states.tolist()
    result = engine.acquire(3, range(96))
    assert (result.status, result.num_needed) == (AcquireStatus.SHORT, 6)
    assert engine.manager.inspect_blocks().states.tolist() == before
    assert engine.num_cached(range(65)) == 64


def test_a_fork_shares_sealed_blocks_and_copies_the_others() -> None:
    engine = EngineSide()
    table = engine.acquire(1, range(50)).block_table
    engine.write(1, 40)
    answer = engine.fork(1, 2, 3)
    assert answer.fork.granted.tolist() == [1, 1]
    assert answer.fork.num_copies.tolist() == [2, 2]
    assert answer.fork.copy_src.tolist() == table[2:].tolist() * 2
    users = engine.manager.inspect_blocks().num_users
    assert users[table].tolist() == [3, 3, 1, 1]
    assert users[answer.fork.copy_dst].tolist() == [1, 1, 1, 1]
    engine.advance(2, [7], 50)
    engine.advance(3, [7], 51)
    engine.release(1, 2, 3)
    assert engine.num_cached([*range(50)]) == 48


def test_a_full_block_whose_last_slot_is_unwritten_is_copied() -> None:
    engine = EngineSide()
    engine.acquire(1, range(32))
    engine.write(1, 31)
    assert engine.fork(1, 2).fork.num_copies.tolist() == [1]
    engine.write(1, 32)
    assert engine.fork(1, 3).fork.num_copies.tolist() == [0]


def test_a_fork_that_does_not_fit_changes_nothing() -> None:
    engine = EngineSide(num_blocks=5)
    engine.acquire(1, range(40))
    answer = engine.call(
        fork=Fork(int64s([1, 1]), int64s([2, 3])), room=Room(int64s([2, 3]), int32s([30, 1]))
    )
    assert answer.fork.granted.tolist() == [0, 0]
    assert answer.room.num_blocks.tolist() == [0, 0]
    assert answer.num_free == 2
    with pytest.raises(InvalidRequestError):
        engine.advance(2, [1], 0)


def test_a_child_gets_room_in_the_call_that_makes_it() -> None:
    engine = EngineSide()
    engine.acquire(1, range(40))
    answer = engine.call(fork=Fork(ONE, int64s([2])), room=Room(int64s([2]), int32s([20])))
    assert answer.room.num_blocks.tolist() == [1]
    engine.advance(2, range(20), 40)


def test_prompt_logprobs_match_nothing_but_are_cached() -> None:
    engine = EngineSide()
    engine.finish(1, range(40))
    assert engine.acquire(2, range(40), match_prefix=False).num_cached == 0
    assert engine.write(2, 40).advance.replaced_indices.tolist() == [0, 1]
    engine.finish(3, range(100, 140), match_prefix=False)
    assert engine.num_cached(range(100, 140)) == 32


def test_lookups_do_not_touch_the_eviction_order() -> None:
    engine = EngineSide(num_blocks=4)
    engine.finish(1, range(32))
    engine.finish(2, range(100, 132))
    engine.num_cached(range(33))
    engine.acquire(3, range(200, 216))
    assert engine.num_cached(range(33)) == 16
    assert engine.num_cached(range(100, 133)) == 32


def test_lookups_see_engines_of_the_same_model_longest_first() -> None:
    engine = EngineSide()
    other = EngineSide(manager=engine.manager, engine_id="other")
    engine.manager.register_engine("stranger", 8, 16, "another model")
    engine.finish(1, range(32))
    other.finish(1, range(64))
    matches = engine.manager.lookup_prefix("model", "", "", int32s(range(65)))
    assert [(match.engine_id, match.num_cached) for match in matches] == [("other", 64), ("engine", 32)]
    assert engine.manager.lookup_prefix("model", "", "", int32s([])) == [("engine", 0), ("other", 0)]


def test_the_sealed_history_counts_hits_and_queries() -> None:
    engine = EngineSide()
    engine.finish(1, range(64))
    engine.acquire(2, range(70))
    stats = engine.manager.stats().engines[0]
    assert (stats.num_query_tokens, stats.num_hit_tokens) == (134, 64)
    assert np.isclose(engine.manager.stats().uptime_s, 0)
