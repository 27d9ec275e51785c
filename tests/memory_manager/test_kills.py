"""Managers that are killed in the middle of their work."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.memory_manager.two_engines import TwoEngines, open_manager

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", range(4))
def test_random_kills_are_not_noticed(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    directory = tmp_path / "0"
    two = TwoEngines(open_manager(directory), seed)
    for i in range(1, 12):
        for _ in range(rng.randint(1, 25)):
            two.step()
        shutil.copytree(directory, tmp_path / str(i))  # what a killed manager leaves behind
        directory = tmp_path / str(i)
        two.reconnect(open_manager(directory))
        two.compare()


@pytest.mark.timeout(240)
def test_a_process_killed_by_force_has_kept_every_answer(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.memory_manager.two_engines", str(tmp_path / "journal"), "5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT)
    assert process.stdout is not None
    for _ in range(60):
        answered = process.stdout.readline()
    process.kill()
    process.wait()
    answered = (process.stdout.read().splitlines() or [answered])[-1]
    process.stdout.close()

    recovered = open_manager(tmp_path / "journal")
    op_seqs = [engine.last_call.op_seq for engine in recovered._state.engines.values()]
    twin = TwoEngines(open_manager(None), seed=5)
    while twin.op_seqs != op_seqs:
        twin.step()
    last_answered = [int(op_seq) for op_seq in answered.split()]
    assert sum(last_answered) <= sum(op_seqs) <= sum(last_answered) + 1
    for engine in twin.engines:
        engine.compare()
    twin.reconnect(recovered)
    for engine, epoch in zip(twin.engines, recovered._state.engines, strict=True):
        engine.epoch = epoch
    twin.compare()
    for _ in range(20):
        twin.step()
    twin.compare()
