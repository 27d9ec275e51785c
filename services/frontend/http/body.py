"""Reads a request's JSON body, strictly and within a bound."""

import asyncio
import json
import re
from typing import Any

import grpc
from fastapi import Request
from pydantic_core import from_json
from starlette.requests import ClientDisconnect

from services.errors import ServiceError, invalid
from services.frontend.generation import cancelled
from services.frontend.rules import shown

_SURROGATE = re.compile("[\ud800-\udfff]")
# Between two pieces of a body.
SILENCE_S = 30.0


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Raises ServiceError for a content type that is not JSON and for more than `max_bytes`."""
    _check_content_type(request)
    return await _read(request, max_bytes)


def parse_object(data: bytes) -> dict[str, Any]:
    """The object, fields that are null left out (null means omitted). Raises ServiceError."""
    value = _parse(data)
    if not isinstance(value, dict):
        raise invalid("body", f"the body must be a JSON object, got {shown(value)}", "INVALID_JSON")
    return {key: entry for key, entry in value.items() if entry is not None}


class BodyTooLarge(ServiceError):
    @property
    def http_status(self) -> int:
        return 413


class BodyTooSlow(ServiceError):
    @property
    def http_status(self) -> int:
        return 408


def _check_content_type(request: Request) -> None:
    content_type = request.headers.get("content-type", "application/json")
    kind = content_type.split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise invalid(
            "content-type",
            f"the content type must be application/json, got {shown(content_type)}",
            "INVALID_CONTENT_TYPE",
        )


async def _read(request: Request, max_bytes: int) -> bytes:
    data = bytearray()
    now = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(SILENCE_S) as deadline:
            async for chunk in request.stream():
                deadline.reschedule(now() + SILENCE_S)
                data += chunk
                if len(data) > max_bytes:
                    raise BodyTooLarge(
                        grpc.StatusCode.INVALID_ARGUMENT,
                        f"the body must have at most {max_bytes} bytes",
                        "BODY_TOO_LARGE",
                        field="body",
                    )
    except TimeoutError as error:
        raise BodyTooSlow(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"nothing came of the body for {SILENCE_S:g} seconds",
            "BODY_TOO_SLOW",
            field="body",
        ) from error
    except ClientDisconnect as error:
        raise cancelled() from error
    return bytes(data)


def _parse(data: bytes) -> Any:
    try:
        # NaN and Infinity are let through here: the field's own rule names the field.
        return from_json(data, allow_inf_nan=True)
    except ValueError as error:
        if (path := _lone_surrogate(data)) is not None:
            raise invalid(path, f"{path} must be valid Unicode, got a lone surrogate") from error
        raise invalid("body", f"the body is not valid JSON: {error}", "INVALID_JSON") from error


def _lone_surrogate(data: bytes) -> str | None:
    """The path of the first string that holds a lone surrogate, if that is what is wrong with the body."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    pending: list[tuple[str, Any]] = [("body", value)]
    while pending:
        path, entry = pending.pop()
        if isinstance(entry, str) and _SURROGATE.search(entry):
            return path
        if isinstance(entry, dict):
            prefix = "" if path == "body" else path + "."
            pending += [(f"{prefix}{key}", item) for key, item in entry.items()]
            pending += [(path, key) for key in entry]
        elif isinstance(entry, list):
            pending += [(f"{path}[{i}]", item) for i, item in enumerate(entry)]
    return None
