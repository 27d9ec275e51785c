"""kill -9 of a memory manager in the middle of an engine's work: outputs are those of an undisturbed run.

The manager is a real process; the model's logits are an exact hash of the prefix.
"""

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from nexuskv.v1 import memory_pb2, memory_pb2_grpc
from services.engine.memory_client import GrpcMemoryClient
from tests.engine.harness import Harness, request

ROOT = Path(__file__).parents[2]
NUM_KILLS = 3
NUM_BLOCKS, MAX_NUM_SEQS = 400, 32


class ManagerProcess:
    def __init__(self, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self._command = [sys.executable, "-m", "services.cli", "memory-manager"]
        self._command += ["--memory-listen", self.address, "--journal", str(directory)]
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.DEVNULL, cwd=ROOT, env=os.environ, start_new_session=True
        )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def restart(self) -> None:
        self.kill()
        self._start()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ManagerProcess]:
    manager = ManagerProcess(tmp_path / "journal")
    try:
        yield manager
    finally:
        manager.kill()


def rounds(harness: Harness, kill_at: frozenset[int], manager: ManagerProcess | None) -> None:
    """The same sixteen prompts twice, with forks; the manager dies before some of the steps."""
    steps = 0
    for name in ("first", "again"):
        for i in range(16):
            prompt = [i % 3] * 40 + [i] * 20
            harness.engine.add(
                request(f"{name}-{i}", prompt, num_choices=1 + i % 2, max_tokens=120, temperature=1.0, seed=i)
            )
        while harness.engine.has_work:
            if steps in kill_at and manager is not None:
                manager.restart()
            harness.step()
            steps += 1


@pytest.mark.parametrize("seed", [0, 1])
def test_outputs_and_cache_are_those_of_an_undisturbed_run(
    manager: ManagerProcess, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    undisturbed = Harness(NUM_BLOCKS, MAX_NUM_SEQS)
    rounds(undisturbed, frozenset(), None)
    with contextlib.closing(GrpcMemoryClient(manager.address, "engine-0")) as client:
        harness = Harness(NUM_BLOCKS, MAX_NUM_SEQS, memory=lambda _: client)
        while harness.engine.step() or harness.engine.has_work:
            pass  # until it is registered
        rounds(harness, frozenset(random.Random(seed).sample(range(5, 200), NUM_KILLS)), manager)
    assert "registering again" not in caplog.text
    assert harness.choices.keys() == undisturbed.choices.keys()
    for key, choice in harness.choices.items():
        expected = undisturbed.choices[key]
        assert (choice.tokens, choice.reason) == (expected.tokens, expected.reason)
        if key[0].startswith("again"):
            assert choice.num_cached == expected.num_cached
    with grpc.insecure_channel(manager.address) as channel:
        stub = memory_pb2_grpc.MemoryManagerServiceStub(channel)
        assert list(stub.CheckIntegrity(memory_pb2.CheckIntegrityRequest()).violations) == []
        (pool,) = stub.GetStats(memory_pb2.GetStatsRequest()).engines
    assert pool.num_free + pool.num_evictable == pool.num_blocks
    assert pool.num_sequences == 0
