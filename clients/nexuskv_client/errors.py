"""One exception tree for everything a NexusKV server can answer.

NexusKVError
├── InvalidArgumentError     a field is wrong: `field` names it, the message says what is allowed
├── UnauthenticatedError, PermissionDeniedError
├── NotFoundError            no such model
├── OverloadedError          the queue is full: `retry_after_s` says when to try again
├── UnavailableError         the server, its engine or its memory manager is gone
├── DeadlineExceededError    the deadline passed; the request was aborted
├── CancelledError           the call was cancelled
└── ServerError              anything else
"""

import grpc
import grpc.aio

from nexuskv_client.details import error_details


class NexusKVError(Exception):
    """What the server said. `reason` is a constant such as CONTEXT_LENGTH_EXCEEDED, when it gave one."""

    def __init__(
        self,
        message: str,
        code: grpc.StatusCode,
        reason: str | None = None,
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidArgumentError(NexusKVError):
    pass


class UnauthenticatedError(NexusKVError):
    pass


class PermissionDeniedError(NexusKVError):
    pass


class NotFoundError(NexusKVError):
    pass


class OverloadedError(NexusKVError):
    pass


class UnavailableError(NexusKVError):
    pass


class DeadlineExceededError(NexusKVError):
    pass


class CancelledError(NexusKVError):
    pass


class ServerError(NexusKVError):
    pass


_CLASSES: dict[grpc.StatusCode, type[NexusKVError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CancelledError,
}


def from_rpc_error(error: grpc.aio.AioRpcError) -> NexusKVError:
    """The tree's exception for a failed call, with the details the server sent along."""
    details = error_details(error)
    kind = _CLASSES.get(error.code(), ServerError)
    if kind is OverloadedError and details.reason is None:
        kind = ServerError  # gRPC's own word about a message that is too large: trying again is no use
    return kind(
        error.details() or error.code().name,
        error.code(),
        details.reason,
        details.field,
        details.retry_after_s,
    )
