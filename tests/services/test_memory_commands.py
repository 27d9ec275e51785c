"""`nexuskv explain`, `blocks` and `replay` against a memory manager in a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.services.memory_process import NUM_BLOCKS, running_memory_manager, serve_requests


class Manager(NamedTuple):
    address: str
    journal: Path


def nexuskv(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )


def said(*arguments: str, **environment: str) -> list[str]:
    done = nexuskv(*arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Manager]:
    journal = tmp_path_factory.mktemp("memory") / "journal"
    with running_memory_manager("--journal", str(journal), "--lease-ms", "3600000") as address:
        serve_requests(address)
        yield Manager(address, journal)


def test_explain(manager: Manager) -> None:
    at = ("--memory", manager.address)
    assert said("explain", "2", *at) == [
        "sequence 2: 48 of 64 tokens were cached",
        "everything that could be cached was",
    ]
    assert said("explain", "3", *at)[1] == "block 0 missed: its tokens were never seen in this namespace"
    headline, reason = said("explain", "4", *at)
    assert headline == "sequence 4: 0 of 64 tokens were cached"
    assert re.fullmatch(
        r"block 0 missed: it was evicted \d+\.\d s before: another tenant needed room; "
        r"2 more blocks would have hit",
        reason,
    )
    (_, told) = said("explain", "4", "--administrator", NEXUSKV_MEMORY_ADDRESS=manager.address)
    assert "another tenant needed room ('bob')" in told
    assert "too short" in said("explain", "5", *at)[1]


def test_blocks(manager: Manager) -> None:
    lines = said("blocks", "--memory-address", manager.address, "--engine-id", "engine-7")
    assert lines[0] == "engine-7: 8 blocks of 16 tokens"
    counts = {line[4:16].strip(): int(line[16:]) for line in lines[1:7]}
    assert counts["private"] == 1
    assert counts["cached"] + counts["free"] == 7
    assert counts["cached, used"] == 0
    assert "  tenant 'ann': 5" in lines
    sketch = lines[-1]
    assert len(sketch) == NUM_BLOCKS
    assert sketch.count("+") == 1
    assert sketch.count("o") == counts["cached"]


def test_replay(manager: Manager, tmp_path: Path) -> None:
    picture = tmp_path / "curve.png"
    lines = said("replay", str(manager.journal), "--plot", str(picture))
    assert lines[0] == "journal-00000001.log: 5 requests, 330 prompt tokens"
    # Sequence 2 finds 48 of 330 tokens, sequence 4 finds what it had evicted.
    assert lines[1].startswith("8 blocks, lru: hit rate 0.145, ")
    curve = [(int(blocks), float(ratio)) for blocks, ratio in (line.split() for line in lines[3:-1])]
    assert [blocks for blocks, _ in curve] == [1, 2, 4, 8, 16, 32]
    assert curve[-1][1] == pytest.approx(1 - 96 / 330, abs=1e-3)
    assert picture.read_bytes().startswith(b"\x89PNG")
    fifo = said("replay", str(manager.journal), "--blocks", "16", "--policy", "fifo", "--plot", str(picture))
    assert fifo[1].startswith("16 blocks, fifo: hit rate 0.291, 0 evictions")


def test_what_cannot_be_done_is_said_in_one_sentence(manager: Manager, tmp_path: Path) -> None:
    at = ("--memory", manager.address)
    nothing = tmp_path / "journal-00000001.log"
    nothing.write_text("not a journal")
    for arguments, words in (
        (("explain", "99", *at), "sequence 99 is unknown"),
        (("explain", "none", *at), "ID=none: must be an integer of at least 1"),
        (("blocks", *at, "--engine-id", "who"), "no engine 'who' is registered"),
        (("blocks", "--memory", "127.0.0.1:1"), "no memory manager answers at 127.0.0.1:1"),
        (("replay", str(tmp_path / "none")), "neither a journal file nor a directory with one"),
        (("replay", str(nothing)), "no journal header"),
        (("replay", str(manager.journal), "--policy", "best"), "--policy=best: must be one of lru, fifo"),
        (("replay", str(manager.journal), "--plot", str(tmp_path / "a" / "b.png")), "b.png"),
    ):
        done = nexuskv(*arguments)
        assert done.returncode == 1
        (sentence,) = done.stderr.strip().splitlines()
        assert words in sentence
