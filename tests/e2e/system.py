"""A whole system for tests: `nexuskv up` in a process of its own, on free ports."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nexuskv.v1 import memory_pb2, memory_pb2_grpc

START_TIMEOUT_S = 240
ADDRESS = {"memory-manager": "NEXUSKV_MEMORY_LISTEN", "engine": "NEXUSKV_ENGINE_LISTEN"}


@dataclass(frozen=True)
class System:
    process: subprocess.Popen[str]
    http: str  # URL
    grpc: str  # address
    model: str

    def child(self, command: str) -> psutil.Process:
        """The living process that runs `nexuskv COMMAND`."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if command in child.cmdline():
                    return child
        raise LookupError(f"no {command} is running")

    @property
    def memory(self) -> memory_pb2_grpc.MemoryManagerServiceStub:
        """The memory manager, asked directly."""
        address = self.child("memory-manager").environ()[ADDRESS["memory-manager"]]
        return memory_pb2_grpc.MemoryManagerServiceStub(grpc.insecure_channel(address))

    def pool(self) -> memory_pb2.GetStatsResponse.Engine:
        """The one engine's pool as the memory manager sees it."""
        (engine,) = self.memory.GetStats(memory_pb2.GetStatsRequest()).engines
        return engine

    def kill(self, command: str) -> None:
        """kill -9; returns when the process is back and everything serves again."""
        old = self.child(command)
        old.kill()
        wait_until(lambda: self._serves(command, other_than=old.pid), 120, f"no new {command}")
        self.wait_ready()

    def _serves(self, command: str, other_than: int) -> bool:
        try:
            child = self.child(command)
            if child.pid == other_than:
                return False
            address = child.environ()[ADDRESS[command]] if command in ADDRESS else self.grpc
            with grpc.insecure_channel(address) as channel:
                answer = health_pb2_grpc.HealthStub(channel).Check(  # type: ignore[attr-defined]
                    health_pb2.HealthCheckRequest(), timeout=2
                )
        except (LookupError, psutil.Error, grpc.RpcError):
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def blocks_in_use(self) -> int:
        """Blocks that a living sequence holds or that wait behind a fence."""
        stats = self.memory.GetStats(memory_pb2.GetStatsRequest())
        return sum(e.num_blocks - e.num_free - e.num_evictable for e in stats.engines)

    def integrity_violations(self) -> list[str]:
        response = self.memory.CheckIntegrity(memory_pb2.CheckIntegrityRequest())
        return list(response.violations)

    def wait_idle(self, timeout_s: float = 10) -> None:
        """Nothing runs, nothing waits, no block is held."""
        wait_until(lambda: self.num_unfinished() == 0 and self.blocks_in_use() == 0, timeout_s, "not idle")

    def num_unfinished(self) -> int:
        return int(self.metric("vllm:num_requests_running") + self.metric("vllm:num_requests_waiting"))

    def metric(self, name: str, label: str = "") -> float:
        """The sum over a metric's samples in /metrics, of those with a label (`name="value"`)."""
        text = httpx.get(f"{self.http}/metrics").text
        labels = rf"\{{[^}}]*{re.escape(label)}[^}}]*\}}"
        labels = labels if label else f"(?:{labels})?"
        values = re.findall(rf"^{re.escape(name)}{labels} (\S+)$", text, re.MULTILINE)
        if not values:
            raise LookupError(f"/metrics has no {name}")
        return sum(map(float, values))

    def wait_ready(self, timeout_s: float = 60) -> None:
        wait_until(lambda: _answers_ready(self.http), timeout_s, "the system did not get ready again")


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.02)


@contextlib.contextmanager
def running_system(log: Path, *options: str) -> Iterator[System]:
    """Starts a system, stops it and makes sure that no process is left."""
    command = [sys.executable, "-m", "services.cli", "up", "--http-port", "0", "--grpc-port", "0", *options]
    command += ["--journal", str(log.parent / "journal")]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ)
    watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
    watchdog.start()
    descendants: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        watchdog.cancel()
        match = re.fullmatch(r"ready http=(\S+) grpc=(\S+) model=(\S+)\n", line)
        assert match, f"no ready line but {line!r}; log:\n{log.read_text()[-4000:]}"
        yield System(process, match[1], match[2], match[3])
    finally:
        watchdog.cancel()
        with contextlib.suppress(psutil.NoSuchProcess):
            descendants = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        if process.stdout is not None:
            process.stdout.close()
        _, alive = psutil.wait_procs(descendants, timeout=10)
        for leftover in alive:
            leftover.kill()
        assert not alive, f"left behind: {alive}"


def _answers_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
