"""uvicorn inside a process that has its own signals, sockets and other doors."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from services.frontend.http.errors import error_body

KEEP_ALIVE_S = 30
# More than any client's headers and the first read of a body together.
MAX_HEAD_BYTES = 1 << 20
MAX_PIPELINED = 64


class HttpServer:
    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=2048,
        )
        self._server = _Server(config)
        self._listener = listener
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._running = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        while not self._server.started:
            if self._running.done():
                self._running.result()
            await asyncio.sleep(0.005)

    async def stop(self, grace_s: float) -> None:
        """Connections that are still answering after `grace_s` are cut."""
        if self._running is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await self._running


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The process decides what a signal means."""
        yield


class _Protocol(HttpToolsProtocol):
    """Bounds the head of a request, and answers what is not HTTP in the shape of any other error.

    Requests that wait behind another one on their connection do not keep its end from being noticed.
    """

    _num_head_bytes: int | None = 0  # None while a body is read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._cycles: list[RequestResponseCycle] = []
        # Who connects has something to say.
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._num_head_bytes is not None:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The head of the request is too large.")
                return
        super().data_received(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._num_head_bytes is not None:  # else it is a trailer, which nobody reads
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._num_head_bytes = None
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        if self.cycle is not None:
            self._cycles.append(self.cycle)
        if len(self._cycles) > MAX_PIPELINED:
            self.send_400_response("Too many requests wait on this connection.")
        elif self.pipeline:
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        body = error_body(msg, "invalid_request_error", None, "invalid_http")
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
