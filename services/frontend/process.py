"""The frontend process: two doors over one core on one event loop."""

import asyncio
import gc
import logging
import resource
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from nexuskv.v1 import inference_pb2_grpc, memory_pb2_grpc
from services.config import ConfigError, FrontendConfig
from services.frontend.core import FrontendCore
from services.frontend.engine_link import EngineLink
from services.frontend.grpc_door import SERVICE_NAME, InferenceServicer
from services.frontend.health_probe import HealthProbe
from services.frontend.http.app import build_app
from services.frontend.http.server import HttpServer
from services.frontend.metrics import FrontendMetrics
from services.frontend.peer_stats import PeerStats
from services.grpc_server import GrpcServer, channel
from services.signals import wait_for_signal
from services.sockets import bind

logger = logging.getLogger(__name__)

READY_POLL_S = 0.05
# A drained door still has the last bytes of its answers to send.
DOOR_GRACE_S = 2.0
KEEPALIVE_IDLE_S = 60


@dataclass(frozen=True)
class FrontendAddresses:
    http: str  # URL
    grpc: str  # host:port
    model: str


async def run_frontend(config: FrontendConfig, on_ready: Callable[[FrontendAddresses], None]) -> None:
    """Serves until SIGTERM or SIGINT, then drains. The doors open at once and answer 503 until the engine
    and the memory manager serve; `on_ready` is called when they first do. Raises ConfigError."""
    frontend = Frontend(config)
    await frontend.start()
    stop = asyncio.create_task(wait_for_signal())
    announce = asyncio.create_task(_announce(frontend, on_ready))
    broken = asyncio.create_task(frontend.broken())
    try:
        await asyncio.wait([stop, broken], return_when=asyncio.FIRST_COMPLETED)
        if broken.done():
            broken.result()
    finally:
        for task in (stop, announce, broken):
            task.cancel()
        await frontend.stop()


async def _announce(frontend: "Frontend", on_ready: Callable[[FrontendAddresses], None]) -> None:
    addresses = await frontend.ready()
    # What is loaded by now stays: the garbage collector need not walk it again and again.
    gc.collect()
    gc.freeze()
    on_ready(addresses)


class Frontend:
    """Owns the channels, the core and the doors."""

    def __init__(self, config: FrontendConfig) -> None:
        self._config = config
        self._engine_channel = channel(config.engine_address)
        self._memory_channel = channel(config.memory_address)
        self._link = EngineLink(self._engine_channel)
        self._memory = HealthProbe(self._memory_channel)
        self.core = FrontendCore(self._link, self._memory, FrontendMetrics())
        self._grpc = GrpcServer([SERVICE_NAME], config.max_body_bytes)
        self._http: HttpServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.grpc_port = self.http_port = 0

    async def start(self) -> None:
        """Opens both doors and begins to look for the peers. Raises ConfigError when a port is taken."""
        _raise_file_limit()
        config, core = self._config, self.core
        listener = bind("--http-port", config.host, config.http_port)
        # A client whose machine is gone is noticed; accepted sockets inherit it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        self.http_port = listener.getsockname()[1]
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceServicer(core), self._grpc.server)
        try:
            self.grpc_port = await self._grpc.start(_join(config.host, config.grpc_port))
        except ConfigError:
            listener.close()
            raise
        stats = PeerStats(self._link.stub, memory_pb2_grpc.MemoryManagerServiceStub(self._memory_channel))
        self._http = HttpServer(build_app(core, stats, config.max_body_bytes), listener)
        await self._http.start()
        runs = (self._link.run(), self._link.probe.run(), self._memory.run(), self._follow_readiness())
        self._tasks = [asyncio.create_task(run) for run in runs]

    async def ready(self) -> FrontendAddresses:
        """Returns when a request would be served."""
        while self.core.not_ready_reason is not None:
            await asyncio.sleep(READY_POLL_S)
        host = self._config.host
        return FrontendAddresses(
            f"http://{_join(host, self.http_port)}", _join(host, self.grpc_port), self.core.model().name
        )

    async def broken(self) -> None:
        """Raises when one of the tasks that are to run for ever has ended."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def stop(self) -> None:
        """New requests are refused at once, running ones finish within the drain timeout."""
        await self._grpc.set_serving(False)
        await self.core.drain(self._config.drain_timeout_s)
        if self._http is not None:
            await self._http.stop(DOOR_GRACE_S)
        await self._grpc.stop(DOOR_GRACE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._engine_channel.close()
        await self._memory_channel.close()
        self.core.close()

    async def _follow_readiness(self) -> None:
        """Keeps the gRPC door's health service in step with /ready."""
        serving = False
        while True:
            if serving != (self.core.not_ready_reason is None):
                serving = not serving
                await self._grpc.set_serving(serving)
            await asyncio.sleep(READY_POLL_S)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _raise_file_limit() -> None:
    """Every stream is a socket: take as many as the system lets this process have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
