"""The memory manager's RPCs for operators and viewers, against a process of its own."""

from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from nexuskv.v1 import memory_pb2 as pb
from nexuskv.v1 import memory_pb2_grpc
from services.arrays import pack_int32, unpack_int32
from tests.services.memory_process import NUM_BLOCKS, running_memory_manager, serve_requests

CACHED = [*range(64)]


@pytest.fixture
def stub() -> Iterator[memory_pb2_grpc.MemoryManagerServiceStub]:
    with running_memory_manager("--journal", "off", "--lease-ms", "3600000") as address:
        serve_requests(address)
        with grpc.insecure_channel(address) as channel:
            yield memory_pb2_grpc.MemoryManagerServiceStub(channel)


def num_cached(stub: memory_pb2_grpc.MemoryManagerServiceStub, tokens: list[int], salt: str = "") -> int:
    """Of tokens and one that follows them."""
    tokens = [*tokens, 5]
    request = pb.LookupPrefixRequest(model_fingerprint="model", salt=salt, tokens=pack_int32(tokens))
    return sum(match.num_cached for match in stub.LookupPrefix(request).matches)


def test_lookup_pin_and_clear(stub: memory_pb2_grpc.MemoryManagerServiceStub) -> None:
    assert num_cached(stub, CACHED) == 64
    assert num_cached(stub, [*CACHED[:20], 7]) == 16
    assert num_cached(stub, CACHED, salt="other") == 0
    pin = stub.PinPrefix(
        pb.PinPrefixRequest(engine_id="engine-7", tenant="ann", tokens=pack_int32(CACHED[:32]), ttl_ms=60_000)
    )
    assert pin.num_tokens == 32
    cleared = stub.ClearCache(pb.ClearCacheRequest(engine_id="engine-7"))
    assert (cleared.num_freed, cleared.num_detached) == (NUM_BLOCKS - 1, 0)
    assert num_cached(stub, CACHED) == 0
    stub.UnpinPrefix(pb.UnpinPrefixRequest(pin_id=pin.pin_id))  # it has ended with what it held
    (engine,) = stub.GetStats(pb.GetStatsRequest()).engines
    assert engine.num_free == NUM_BLOCKS - 1  # one sequence is left
    assert list(stub.CheckIntegrity(pb.CheckIntegrityRequest()).violations) == []


def test_what_is_wrong_is_named(stub: memory_pb2_grpc.MemoryManagerServiceStub) -> None:
    wrong = {
        "unknown": lambda: stub.PinPrefix(
            pb.PinPrefixRequest(engine_id="unknown", tenant="ann", tokens=pack_int32(CACHED), ttl_ms=1)
        ),
        "tokens": lambda: stub.LookupPrefix(pb.LookupPrefixRequest(model_fingerprint="model", tokens=b"123")),
        "ttl_ms": lambda: stub.PinPrefix(
            pb.PinPrefixRequest(engine_id="engine-7", tenant="ann", tokens=pack_int32(CACHED))
        ),
    }
    for word, call in wrong.items():
        with pytest.raises(grpc.RpcError) as refused:
            call()  # type: ignore[no-untyped-call]
        assert word in str(refused.value.details())
        assert refused.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)


def test_watchers_see_a_change(stub: memory_pb2_grpc.MemoryManagerServiceStub) -> None:
    blocks = stub.WatchBlocks(pb.WatchBlocksRequest(engine_id="engine-7"), timeout=60)
    events = stub.WatchEvents(pb.WatchEventsRequest(), timeout=60)
    snapshot = next(blocks).snapshot
    assert len(snapshot.states) == NUM_BLOCKS
    nothing, *stored = [next(events) for _ in range(3)]
    assert nothing.HasField("cleared")
    assert {event.engine_id for event in (nothing, *stored)} == {"engine-7"}
    assert {event.seq for event in (nothing, *stored)} == {nothing.seq}
    tokens = [unpack_int32(event.stored.tokens).tolist() for event in stored]
    assert CACHED in tokens
    assert sum(map(len, tokens)) == 16 * (NUM_BLOCKS - 1)
    stub.ClearCache(pb.ClearCacheRequest(engine_id="engine-7"))
    delta = next(blocks).delta
    assert delta.from_seq < delta.to_seq
    assert len(unpack_int32(delta.blocks)) == NUM_BLOCKS - 1
    assert np.all(unpack_int32(delta.num_users) == 0)
    removed = [next(events)]
    while sum(len(unpack_int32(event.removed.blocks)) for event in removed) < NUM_BLOCKS - 1:
        removed.append(next(events))
    assert [event.seq for event in removed] == [nothing.seq + 1 + i for i in range(len(removed))]
    blocks.cancel()
    events.cancel()
