"""`nexuskv explain` and `nexuskv blocks`: what a running memory manager knows, in words."""

from collections.abc import Callable

import grpc
import grpc.aio
import numpy as np

from nexuskv.v1 import memory_pb2 as pb
from nexuskv.v1 import memory_pb2_grpc
from services.arrays import unpack_int32
from services.config import BlocksConfig, ExplainConfig
from services.grpc_server import CHANNEL_OPTIONS
from services.startup import CommandError

TIMEOUT_S = 10.0
Say = Callable[[str], None]


async def explain(config: ExplainConfig, say: Say) -> None:
    """Why a sequence hit or missed the cache. Raises CommandError."""
    request = pb.ExplainSequenceRequest(
        engine_id=config.engine_id, sequence_id=config.sequence_id, administrator=config.administrator
    )
    async with _channel(config) as channel:
        try:
            stub = memory_pb2_grpc.MemoryManagerServiceStub(channel)
            answer = await stub.ExplainSequence(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _failure(config, error) from error
    say(f"sequence {answer.sequence_id}: {answer.num_cached} of {answer.num_tokens} tokens were cached")
    say(_reason(answer))


async def show_blocks(config: BlocksConfig, say: Say) -> None:
    """A map of the pool, and who has how much of it. Raises CommandError."""
    async with _channel(config) as channel:
        try:
            stub = memory_pb2_grpc.MemoryManagerServiceStub(channel)
            request = pb.InspectBlocksRequest(engine_id=config.engine_id)
            picture = await stub.InspectBlocks(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _failure(config, error) from error
    _say_blocks(picture, say)


def _channel(config: BlocksConfig) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(config.memory_address, options=CHANNEL_OPTIONS)


def _failure(config: BlocksConfig, error: grpc.aio.AioRpcError) -> CommandError:
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return CommandError(f"no memory manager answers at {config.memory_address}; give --memory-address")
    return CommandError(error.details() or error.code().name)


_REASONS = {
    pb.ExplainSequenceResponse.MISS_REASON_NEVER_SEEN: "its tokens were never seen in this namespace",
    pb.ExplainSequenceResponse.MISS_REASON_PENDING: "another sequence was computing it at that moment",
    pb.ExplainSequenceResponse.MISS_REASON_PURGED: "the cache was cleared",
}
_CAUSES = {
    pb.ExplainSequenceResponse.EVICTION_CAUSE_OWN_PRESSURE: "its own tenant needed room",
    pb.ExplainSequenceResponse.EVICTION_CAUSE_SHARED_PRESSURE: "another tenant needed room",
    pb.ExplainSequenceResponse.EVICTION_CAUSE_QUOTA: "its tenant was at its quota",
}


def _reason(answer: pb.ExplainSequenceResponse) -> str:
    match answer.reason:
        case answer.MISS_REASON_NONE:
            return "everything that could be cached was"
        case answer.MISS_REASON_SHORTER_THAN_BLOCK:
            return "it is too short: a block has 16 tokens, and the last token is always computed"
        case answer.MISS_REASON_NOT_ASKED:
            return "the cache was not asked: prompt log probabilities need every token computed"
        case answer.MISS_REASON_EVICTED:
            whom = f" ({answer.evicted_for_tenant!r})" if answer.evicted_for_tenant else ""
            when = f"it was evicted {answer.evicted_seconds_ago:.1f} s before"
            reason = f"{when}: {_CAUSES[answer.eviction_cause]}{whom}"
        case other:
            reason = _REASONS[other]
    more = f"; {answer.num_more_blocks} more blocks would have hit" if answer.num_more_blocks else ""
    return f"block {answer.missed_at_block} missed: {reason}{more}"


STATES = ("free", "private", "cached", "fenced", "quarantined")
# One sign per state; a cached block that somebody uses is marked apart.
_SIGNS, _IN_USE, _PER_LINE, _MOST_LINES = ".+o~!", "O", 64, 32


def _say_blocks(picture: pb.InspectBlocksResponse, say: Say) -> None:
    states = np.frombuffer(picture.states, np.uint8)
    num_users, owners = unpack_int32(picture.num_users), unpack_int32(picture.owners)
    say(f"{picture.engine_id}: {states.size} blocks of 16 tokens")
    for code, state in enumerate(STATES):
        say(f"  {_SIGNS[code]} {state:12} {int((states == code).sum()):>9}")
    say(f"  {_IN_USE} {'cached, used':12} {int(((states == 2) & (num_users > 0)).sum()):>9}")
    for tenant, name in enumerate(picture.tenants):
        if (owners == tenant).any():
            say(f"  tenant {name!r}: {int((owners == tenant).sum())}")
    signs = np.array(list(_SIGNS))[states]
    signs[(states == 2) & (num_users > 0)] = _IN_USE
    per_sign = -(-states.size // (_PER_LINE * _MOST_LINES))
    if per_sign > 1:
        say(f"every {per_sign}th block:")
    shown = "".join(signs[::per_sign])
    for start in range(0, len(shown), _PER_LINE):
        say(shown[start : start + _PER_LINE])
