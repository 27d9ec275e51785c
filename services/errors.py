"""One exception tree for the processes and its one mapping to gRPC status and HTTP codes."""

from dataclasses import dataclass
from typing import NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

ERROR_DOMAIN = "nexuskv"

HTTP_STATUS: dict[grpc.StatusCode, int] = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.ABORTED: 409,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.CANCELLED: 499,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


@dataclass
class ServiceError(Exception):
    """What a caller is told. `reason` is a constant in UPPER_SNAKE_CASE, `field` names the wrong field."""

    code: grpc.StatusCode
    message: str
    reason: str
    field: str | None = None
    retry_after_ms: int | None = None

    def __str__(self) -> str:
        return self.message

    @property
    def http_status(self) -> int:
        return HTTP_STATUS.get(self.code, 500)


def invalid(field: str, message: str, reason: str = "INVALID_VALUE") -> ServiceError:
    return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, message, reason, field=field)


def not_found(message: str, reason: str, field: str | None = None) -> ServiceError:
    return ServiceError(grpc.StatusCode.NOT_FOUND, message, reason, field=field)


def unavailable(message: str, reason: str, retry_after_ms: int | None = None) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAVAILABLE, message, reason, retry_after_ms=retry_after_ms)


def overloaded(message: str, reason: str, retry_after_ms: int) -> ServiceError:
    return ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason, retry_after_ms=retry_after_ms)


async def abort(context: "grpc.aio.ServicerContext[object, object]", error: ServiceError) -> NoReturn:
    """Ends the RPC with the error's status and its google.rpc details."""
    details = [error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)]
    packed = [_pack(detail) for detail in details]
    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        packed.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.retry_after_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        packed.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    status = status_pb2.Status(code=error.code.value[0], message=error.message, details=packed)
    await context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status returned")


def error_reason(error: grpc.Call) -> str | None:
    """The ErrorInfo reason that a peer sent with its status, if any."""
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Is(info.DESCRIPTOR) and detail.Unpack(info):
            return str(info.reason)
    return None


def _pack(message: object) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)  # type: ignore[arg-type]
    return packed
