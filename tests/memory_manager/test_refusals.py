"""What is refused, and why: nothing has changed then."""

from typing import Any

import pytest

from memory_manager import (
    Acquire,
    Advance,
    Fork,
    InvalidRequestError,
    MemoryManagerError,
    PreconditionError,
    Release,
    Room,
    Truncate,
    UpdateRequest,
)
from tests.memory_manager.engine_side import EngineSide, int32s, int64s

ONE = int64s([1])


def reason(error: pytest.ExceptionInfo[MemoryManagerError]) -> str:
    return error.value.reason


def test_the_same_number_with_another_body_is_refused() -> None:
    engine = EngineSide()
    engine.acquire(1, range(50))
    other = UpdateRequest(engine.epoch, 1, acquires=(Acquire(1, int32s(range(51))),))
    with pytest.raises(InvalidRequestError) as refused:
        engine.manager.update_sequences(other)
    assert reason(refused) == "BODY_MISMATCH"


@pytest.mark.parametrize("op_seq", [0, 3, 17])
def test_a_gap_is_refused(op_seq: int) -> None:
    engine = EngineSide()
    engine.acquire(1, range(50))
    with pytest.raises(PreconditionError) as refused:
        engine.manager.update_sequences(UpdateRequest(engine.epoch, op_seq))
    assert reason(refused) == "OP_SEQ_GAP"


def test_an_old_epoch_is_over_when_the_engine_registers_anew() -> None:
    engine = EngineSide()
    engine.acquire(1, range(50))
    registration = engine.manager.register_engine("engine", 64, 16, "model")
    assert registration.epoch > engine.epoch
    assert (registration.lease_ms, registration.heartbeat_interval_ms) == (10_000, 2_000)
    with pytest.raises(PreconditionError) as refused:
        engine.acquire(2, range(50))
    assert reason(refused) == "STALE_EPOCH"
    with pytest.raises(PreconditionError):
        engine.manager.heartbeat(engine.epoch)
    assert engine.manager.stats().engines[0].num_free == 64


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "expected"),
    [(0, 16, "BAD_POOL_SIZE"), (-1, 16, "BAD_POOL_SIZE"), (8, 32, "BAD_BLOCK_SIZE")],
)
def test_a_pool_that_cannot_be_is_refused(num_blocks: int, block_size: int, expected: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        EngineSide().manager.register_engine("other", num_blocks, block_size, "model")
    assert reason(refused) == expected


def test_a_rejected_call_consumes_no_number() -> None:
    engine = EngineSide()
    engine.acquire(1, range(50))
    with pytest.raises(InvalidRequestError):
        engine.advance(2, [1], 0)
    assert engine.op_seq == 1
    engine.advance(1, [1], 50)


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ({"advance": Advance(int64s([9]), int32s([0]), int32s([]), int32s([0]))}, "UNKNOWN_SEQUENCE"),
        ({"advance": Advance(ONE, int32s([-1]), int32s([]), int32s([20]))}, "BAD_NUM_TOKENS"),
        ({"advance": Advance(ONE, int32s([13]), int32s(range(13)), int32s([20]))}, "NO_ROOM"),
        ({"advance": Advance(ONE, int32s([0]), int32s([]), int32s([15]))}, "BAD_NUM_WRITTEN"),
        ({"advance": Advance(ONE, int32s([0]), int32s([]), int32s([21]))}, "BAD_NUM_WRITTEN"),
        ({"advance": Advance(ONE, int32s([2]), int32s([5]), int32s([20]))}, "BAD_ARRAY_LENGTH"),
        ({"advance": Advance(ONE, int32s([]), int32s([]), int32s([20]))}, "BAD_ARRAY_LENGTH"),
        (
            {"advance": Advance(ONE, int32s([0]), int32s([]), int32s([20]), int32s([1, 2]))},
            "BAD_ARRAY_LENGTH",
        ),
        ({"advance": Advance(ONE, int64s([0]), int32s([]), int32s([20]))}, "BAD_ARRAY"),  # type: ignore[arg-type]
        (
            {"advance": Advance(int64s([1, 7, 1])[::2], int32s([0, 0]), int32s([]), int32s([20, 20]))},
            "BAD_ARRAY",
        ),
        (
            {"advance": Advance(int64s([1, 1]), int32s([0, 0]), int32s([]), int32s([20, 20]))},
            "DUPLICATE_SEQUENCE",
        ),
        ({"truncate": Truncate(int64s([9]), int32s([0]))}, "UNKNOWN_SEQUENCE"),
        ({"truncate": Truncate(ONE, int32s([1]))}, "TRUNCATE_TOO_SHORT"),
        ({"truncate": Truncate(ONE, int32s([-1]))}, "BAD_TRUNCATE"),
        ({"truncate": Truncate(ONE, int32s([3]))}, "BAD_TRUNCATE"),
        ({"truncate": Truncate(ONE, int32s([2, 2]))}, "BAD_ARRAY_LENGTH"),
        ({"truncate": Truncate(int64s([1, 1]), int32s([2, 2]))}, "DUPLICATE_SEQUENCE"),
        ({"fork": Fork(int64s([9]), int64s([3]))}, "UNKNOWN_SEQUENCE"),
        ({"fork": Fork(ONE, int64s([2]))}, "SEQUENCE_EXISTS"),
        ({"fork": Fork(int64s([1, 2]), int64s([3, 3]))}, "DUPLICATE_SEQUENCE"),
        ({"fork": Fork(ONE, int64s([0]))}, "BAD_SEQUENCE_ID"),
        ({"fork": Fork(ONE, int64s([3])), "release": Release(ONE)}, "UNKNOWN_SEQUENCE"),
        ({"room": Room(int64s([9]), int32s([1]))}, "UNKNOWN_SEQUENCE"),
        ({"room": Room(ONE, int32s([-1]))}, "BAD_NUM_TOKENS"),
        ({"room": Room(int64s([1, 1]), int32s([1, 1]))}, "DUPLICATE_SEQUENCE"),
        ({"room": Room(ONE, int32s([1])), "release": Release(ONE)}, "UNKNOWN_SEQUENCE"),
        ({"acquires": (Acquire(2, int32s([1])),)}, "SEQUENCE_EXISTS"),
        ({"acquires": (Acquire(3, int32s([1])), Acquire(3, int32s([1])))}, "DUPLICATE_SEQUENCE"),
        ({"acquires": (Acquire(-3, int32s([1])),)}, "BAD_SEQUENCE_ID"),
        ({"acquires": (Acquire(3, int32s([])),)}, "NO_TOKENS"),
        ({"acquires": (Acquire(3, int32s([1])),), "fork": Fork(ONE, int64s([3]))}, "DUPLICATE_SEQUENCE"),
    ],
)
def test_a_wrong_entry_rejects_the_whole_call(lists: dict[str, Any], expected: str) -> None:
    engine = EngineSide()
    engine.acquire(1, range(20))
    engine.acquire(2, range(100, 120))
    engine.write(1, 20)
    before = engine.manager.stats().engines
    with pytest.raises(InvalidRequestError) as refused:
        engine.call(**lists)
    assert reason(refused) == expected
    assert engine.manager.stats().engines == before


@pytest.mark.parametrize(("launched", "completed"), [(5, 6), (3, 3), (5, 3)])
def test_steps_never_go_back(launched: int, completed: int) -> None:
    engine = EngineSide()
    engine.launched, engine.completed = 4, 4
    engine.acquire(1, range(20))
    engine.launched, engine.completed = launched, completed
    with pytest.raises(InvalidRequestError) as refused:
        engine.acquire(2, range(20))
    assert reason(refused) == "BAD_STEPS"
