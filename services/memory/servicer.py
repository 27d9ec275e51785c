"""MemoryManagerService: translates between messages and the memory manager on this event loop."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from memory_manager import MemoryManager
from memory_manager.errors import (
    ExhaustedError,
    InvalidRequestError,
    MemoryManagerError,
    NotFoundError,
    PreconditionError,
)
from nexuskv.v1 import memory_pb2 as pb
from nexuskv.v1 import memory_pb2_grpc
from services import errors
from services.memory.convert import (
    answer_to_pb,
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
}

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
            code = _CODES[type(error)]
            await errors.abort(context, errors.ServiceError(code, str(error), error.reason))

    return answer


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
        return snapshot_to_pb(self._manager.inspect_blocks(request.engine_id))

    @_answers_errors
    async def CheckIntegrity(
        self, request: pb.CheckIntegrityRequest, context: Context
    ) -> pb.CheckIntegrityResponse:
        violations = self._manager.check_integrity()
        return pb.CheckIntegrityResponse(ok=not violations, violations=violations)
