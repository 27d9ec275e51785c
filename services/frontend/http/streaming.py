"""Server-sent events, and what both kinds of answer do about a client that goes away."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from fastapi import Response
from starlette.types import Receive, Scope, Send

from services.errors import ServiceError
from services.frontend.active_request import ActiveRequest
from services.frontend.http.errors import service_error_body
from services.frontend.outputs import Delta


class EventWriter(Protocol):
    """Spells a stream's events. Each method answers whole `data: …` events, or nothing."""

    def opening(self) -> bytes: ...
    def delta(self, delta: Delta) -> bytes: ...
    def closing(self) -> bytes: ...


@contextlib.asynccontextmanager
async def abort_on_disconnect(receive: Receive, active: ActiveRequest) -> AsyncIterator[None]:
    """While inside, a client that goes away ends the request with CANCELLED."""
    watch = asyncio.create_task(_watch(receive, active))
    try:
        yield
    finally:
        watch.cancel()


async def _watch(receive: Receive, active: ActiveRequest) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    active.cancel()


class EventStream(Response):
    """Starts the request, waits until the engine has taken it, then streams.

    An error before the first byte is an ordinary error response. After that it is one `data: {"error": …}`
    event, and the connection closes: streams announce `connection: close`.
    """

    def __init__(
        self, start: Callable[[], ActiveRequest], writer: Callable[[ActiveRequest], EventWriter]
    ) -> None:
        self._start = start
        self._writer = writer
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._start() as active:
            async with abort_on_disconnect(receive, active):
                await active.accepted()
                writer = self._writer(active)
                await send({"type": "http.response.start", "status": 200, "headers": _headers(active)})
                try:
                    await _send(send, writer.opening())
                    async for deltas in active.deltas():
                        await _send(send, b"".join([writer.delta(delta) for delta in deltas]))
                    last = writer.closing()
                except ServiceError as error:
                    last = b"data: " + service_error_body(error) + b"\n\n"
                await send({"type": "http.response.body", "body": last})


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _headers(active: ActiveRequest) -> list[tuple[bytes, bytes]]:
    return [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
        (b"connection", b"close"),
        (b"x-request-id", active.request_id.encode()),
    ]
