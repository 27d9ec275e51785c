"""uvicorn inside a process that has its own signals, sockets and other doors."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.frontend.http.errors import error_body

KEEP_ALIVE_S = 30


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
            timeout_keep_alive=KEEP_ALIVE_S,
            backlog=4096,
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
    def send_400_response(self, msg: str) -> None:
        """A request that is not HTTP gets the same error shape as any other."""
        body = error_body(msg, "invalid_request_error", None, "invalid_http")
        head = (
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
