"""Errors as the OpenAI API shows them: {"error": {"message", "type", "param", "code"}}."""

import json
import math

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from services.errors import ServiceError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def error_type(status: int) -> str:
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_body(message: str, type: str, param: str | None, code: str | None) -> bytes:
    error = {"message": message, "type": type, "param": param, "code": code}
    return json.dumps({"error": error}, ensure_ascii=True, allow_nan=False).encode()


def service_error_body(error: ServiceError) -> bytes:
    return error_body(str(error), error_type(error.http_status), error.field, error.reason.lower())


def service_error_response(error: ServiceError) -> Response:
    headers = {}
    if error.retry_after_ms is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_ms / 1000)))
    return Response(service_error_body(error), error.http_status, headers, "application/json")


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ServiceError, _on_service_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_bug)


async def _on_service_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServiceError)
    return service_error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Unknown routes and wrong methods."""
    assert isinstance(error, HTTPException)
    status = error.status_code
    what = {404: "no such route", 405: "this route does not take that method"}.get(status, error.detail)
    code = {404: "route_not_found", 405: "method_not_allowed"}.get(status)
    body = error_body(f"{what}: {request.method} {request.url.path}", error_type(status), None, code)
    return Response(body, status, error.headers, "application/json")


async def _on_bug(request: Request, error: Exception) -> Response:
    body = error_body("the server failed to answer this request", "server_error", None, "internal_error")
    return Response(body, 500, None, "application/json")
