"""`nexuskv up`: starts the three processes on this machine, restarts what dies, drains on Ctrl-C."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from services.config import (
    ENV_PREFIX,
    CommonConfig,
    EngineConfig,
    FrontendConfig,
    MemoryManagerConfig,
    load,
    to_environment,
)
from services.signals import SUPERVISED, wait_for_signal
from services.sockets import bind
from services.startup import StartError

logger = logging.getLogger(__name__)

READY_PREFIX = "ready "
ANY_PORT = "127.0.0.1:0"
FIRST_RESTART_DELAY_S, MAX_RESTART_DELAY_S = 0.1, 5.0
# A process that lived this long was healthy: its next restart is quick again.
HEALTHY_S = 30.0
STOP_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class SystemConfig:
    memory_manager: MemoryManagerConfig
    engine: EngineConfig
    frontend: FrontendConfig

    @classmethod
    def load(cls, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> "SystemConfig":
        """What nobody gave an address takes a port that is free now; all keep theirs over restarts.

        Raises ConfigError.
        """
        environ = {ENV_PREFIX + name: ANY_PORT for name in ("MEMORY_LISTEN", "ENGINE_LISTEN")} | dict(environ)
        memory_manager = load(MemoryManagerConfig, arguments, environ)
        engine = load(EngineConfig, arguments, environ)
        frontend = load(FrontendConfig, arguments, environ)
        memory_address = _with_port(memory_manager.memory_listen)
        engine_address = _with_port(engine.engine_listen)
        return cls(
            replace(memory_manager, memory_listen=memory_address),
            replace(engine, engine_listen=engine_address, memory_address=memory_address),
            replace(
                frontend,
                http_port=frontend.http_port or _free_port(),
                grpc_port=frontend.grpc_port or _free_port(),
                engine_address=engine_address,
                memory_address=memory_address,
            ),
        )


class Child:
    """One supervised process. It says `ready …` on its standard output when it serves."""

    def __init__(self, command: str, config: CommonConfig) -> None:
        self.command = command
        self._environment = {**os.environ, **to_environment(config), SUPERVISED: "1"}
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self.ready_line = ""

    async def start(self) -> None:
        """Answers when the process is ready. Raises StartError when it ends before."""
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.cli",
            self.command,
            env=self._environment,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # Ctrl-C in a terminal reaches a whole process group; the order of stopping is ours.
            start_new_session=True,
        )
        assert process.stdout is not None
        while line := (await process.stdout.readline()).decode():
            if line.startswith(READY_PREFIX):
                self.ready_line = line.strip()
                return
        code = await process.wait()
        raise StartError(f"the {self.command} did not start (exit code {code}); its reason stands above")

    async def keep_alive(self) -> None:
        """Restarts the process whenever it ends, until it is stopped."""
        delay = FIRST_RESTART_DELAY_S
        while not self._stopping:
            assert self._process is not None
            since = time.monotonic()
            code = await self._process.wait()
            if self._stopping:
                return
            if time.monotonic() - since > HEALTHY_S:
                delay = FIRST_RESTART_DELAY_S
            logger.warning("the %s ended (exit code %d); restarting in %.1f s", self.command, code, delay)
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_RESTART_DELAY_S)
            with contextlib.suppress(StartError):
                await self.start()

    async def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        self._stopping = True
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), timeout_s)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()


async def run_system(config: SystemConfig, on_ready: Callable[[str], None]) -> None:
    """Runs until SIGTERM or SIGINT. `on_ready` hears the ready line. Raises StartError or ConfigError."""
    _check_doors(config.frontend)
    logger.info("the memory manager's address is %s", config.memory_manager.memory_listen)
    memory = Child("memory-manager", config.memory_manager)
    engine = Child("engine", config.engine)
    frontend = Child("frontend", config.frontend)
    stop = asyncio.create_task(wait_for_signal())
    run = asyncio.create_task(_start_and_watch([memory, engine, frontend], on_ready))
    try:
        await asyncio.wait([stop, run], return_when=asyncio.FIRST_COMPLETED)
        if run.done():
            run.result()
    finally:
        run.cancel()
        stop.cancel()
        # The frontend drains while the other two still serve it.
        await frontend.stop(config.frontend.drain_timeout_s + STOP_TIMEOUT_S)
        await engine.stop()
        await memory.stop()


async def _start_and_watch(children: list[Child], on_ready: Callable[[str], None]) -> None:
    """Starts all, the frontend last; each is watched from the moment it is ready."""
    *inner, frontend = children
    await asyncio.gather(*(child.start() for child in inner))
    watches = [asyncio.create_task(child.keep_alive()) for child in inner]
    try:
        await frontend.start()
        on_ready(frontend.ready_line)
        await asyncio.gather(frontend.keep_alive(), *watches)
    finally:
        for watch in watches:
            watch.cancel()


def _check_doors(config: FrontendConfig) -> None:
    """A port in use is said at once, not after the model has loaded."""
    for option, port in (("--http-port", config.http_port), ("--grpc-port", config.grpc_port)):
        bind(option, config.host, port).close()


def _with_port(address: str) -> str:
    host, colon, port = address.rpartition(":")
    return f"{host}{colon}{_free_port()}" if port == "0" else address


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
