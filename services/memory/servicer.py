"""MemoryManagerService: translates between messages and the memory manager on this event loop."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio

from memory_manager import MemoryManager
from memory_manager.errors import (
    ExhaustedError,
    InvalidRequestError,
    MemoryManagerError,
    NotFoundError,
    OutOfRangeError,
    PreconditionError,
)
from memory_manager.inspection import delta_between
from memory_manager.journal.file import JournalUnavailableError
from memory_manager.reader import violations_of
from nexuskv.v1 import memory_pb2 as pb
from nexuskv.v1 import memory_pb2_grpc
from services import errors
from services.memory.convert import (
    answer_to_pb,
    delta_to_pb,
    event_to_pb,
    explanation_to_pb,
    int32s,
    matches_to_pb,
    snapshot_to_pb,
    stats_to_pb,
    update_from_pb,
)

_CODES: dict[type[MemoryManagerError], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    PreconditionError: grpc.StatusCode.FAILED_PRECONDITION,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    ExhaustedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    OutOfRangeError: grpc.StatusCode.OUT_OF_RANGE,
    JournalUnavailableError: grpc.StatusCode.UNAVAILABLE,
}
# How often a watcher looks for what is new.
MIN_WATCH_INTERVAL_S = 0.016
EVENTS_INTERVAL_S = 0.05

Context = grpc.aio.ServicerContext[Any, Any]
Request = TypeVar("Request")
Response = TypeVar("Response")


def _answers_errors(
    method: Callable[["MemoryServicer", Request, Context], Awaitable[Response]],
) -> Callable[["MemoryServicer", Request, Context], Awaitable[Response]]:
    """A rejected call ends with the status of its error and its reason."""

    @functools.wraps(method)
    async def answer(self: "MemoryServicer", request: Request, context: Context) -> Response:
        try:
            return await method(self, request, context)
        except MemoryManagerError as error:
            await _reject(context, error)

    return answer


async def _reject(context: Context, error: MemoryManagerError) -> NoReturn:
    code = _CODES[type(error)]
    await errors.abort(context, errors.ServiceError(code, str(error), error.reason))


class MemoryServicer(memory_pb2_grpc.MemoryManagerServiceServicer):
    def __init__(self, manager: MemoryManager) -> None:
        self._manager = manager

    @_answers_errors
    async def RegisterEngine(
        self, request: pb.RegisterEngineRequest, context: Context
    ) -> pb.RegisterEngineResponse:
        registration = self._manager.register_engine(
            request.engine_id, request.num_blocks, request.block_size, request.model_fingerprint
        )
        return pb.RegisterEngineResponse(
            epoch=registration.epoch,
            lease_ms=registration.lease_ms,
            heartbeat_interval_ms=registration.heartbeat_interval_ms,
        )

    @_answers_errors
    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        self._manager.heartbeat(request.epoch)
        return pb.HeartbeatResponse()

    @_answers_errors
    async def UpdateSequences(
        self, request: pb.UpdateSequencesRequest, context: Context
    ) -> pb.UpdateSequencesResponse:
        return answer_to_pb(self._manager.update_sequences(update_from_pb(request)))

    @_answers_errors
    async def LookupPrefix(
        self, request: pb.LookupPrefixRequest, context: Context
    ) -> pb.LookupPrefixResponse:
        tokens = int32s(request.tokens, "tokens")
        return matches_to_pb(
            self._manager.lookup_prefix(request.model_fingerprint, request.salt, request.adapter, tokens)
        )

    @_answers_errors
    async def GetStats(self, request: pb.GetStatsRequest, context: Context) -> pb.GetStatsResponse:
        return stats_to_pb(self._manager.stats())

    @_answers_errors
    async def InspectBlocks(
        self, request: pb.InspectBlocksRequest, context: Context
    ) -> pb.InspectBlocksResponse:
        snapshot = await asyncio.to_thread(self._manager.inspect_blocks, request.engine_id)
        return snapshot_to_pb(snapshot)

    async def WatchBlocks(
        self, request: pb.WatchBlocksRequest, context: Context
    ) -> AsyncIterator[pb.WatchBlocksResponse]:
        """Reads in another thread, so that a viewer does not hold up the engines' calls."""
        interval_s = max(request.min_interval_ms / 1e3, MIN_WATCH_INTERVAL_S)
        try:
            seen = await asyncio.to_thread(self._manager.inspect_blocks, request.engine_id)
            yield pb.WatchBlocksResponse(snapshot=snapshot_to_pb(seen))
            while True:
                await asyncio.sleep(interval_s)
                now = await asyncio.to_thread(self._manager.inspect_blocks, request.engine_id)
                delta = delta_between(seen, now)
                if delta is None:
                    yield pb.WatchBlocksResponse(snapshot=snapshot_to_pb(now))
                elif delta.blocks.size:
                    yield delta_to_pb(delta)
                seen = now
        except MemoryManagerError as error:
            await _reject(context, error)

    async def WatchEvents(
        self, request: pb.WatchEventsRequest, context: Context
    ) -> AsyncIterator[pb.WatchEventsResponse]:
        after = request.after_seq
        try:
            while True:
                for event in self._manager.events(after):
                    yield event_to_pb(event)
                    after = event.seq
                await asyncio.sleep(EVENTS_INTERVAL_S)
        except MemoryManagerError as error:
            await _reject(context, error)

    @_answers_errors
    async def ExplainSequence(
        self, request: pb.ExplainSequenceRequest, context: Context
    ) -> pb.ExplainSequenceResponse:
        return explanation_to_pb(
            self._manager.explain(request.engine_id, request.sequence_id, administrator=request.administrator)
        )

    @_answers_errors
    async def PinPrefix(self, request: pb.PinPrefixRequest, context: Context) -> pb.PinPrefixResponse:
        tokens = int32s(request.tokens, "tokens")
        pin = self._manager.pin_prefix(
            request.engine_id, request.tenant, request.salt, request.adapter, tokens, request.ttl_ms
        )
        return pb.PinPrefixResponse(pin_id=pin.pin_id, num_tokens=pin.num_tokens)

    @_answers_errors
    async def UnpinPrefix(self, request: pb.UnpinPrefixRequest, context: Context) -> pb.UnpinPrefixResponse:
        self._manager.unpin_prefix(request.pin_id)
        return pb.UnpinPrefixResponse()

    @_answers_errors
    async def ClearCache(self, request: pb.ClearCacheRequest, context: Context) -> pb.ClearCacheResponse:
        salt = request.salt if request.only_salt else None
        cleared = self._manager.clear_cache(request.engine_id, salt)
        return pb.ClearCacheResponse(num_freed=cleared.num_freed, num_detached=cleared.num_detached)

    @_answers_errors
    async def CheckIntegrity(
        self, request: pb.CheckIntegrityRequest, context: Context
    ) -> pb.CheckIntegrityResponse:
        # Beside the engines' calls: it takes seconds for long chains.
        copies = self._manager.copies_to_check()
        violations = await asyncio.to_thread(violations_of, copies)
        return pb.CheckIntegrityResponse(ok=not violations, violations=violations)
