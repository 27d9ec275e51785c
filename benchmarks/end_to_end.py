"""The whole system through its HTTP door: a fresh server, its cache and journal empty, for each workload."""

import asyncio
import contextlib
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from benchmarks.figures import figure
from benchmarks.openai_server import measure as measure_server


class Reported(NamedTuple):
    figure: str
    workload: str
    key: str  # of what is measured
    unit: str
    better: Literal["higher", "lower"]
    target: float | None = None


REPORTED = (
    Reported("e2e.single", "single", "tok_s", "tok/s", "higher", 98),
    Reported("e2e.conc8", "conc8", "tok_s", "tok/s", "higher", 400),
    Reported("e2e.conc16", "conc16", "tok_s", "tok/s", "higher", 520),
    Reported("e2e.prefix16", "prefix16", "tok_s", "tok/s", "higher", 354),
    Reported("e2e.long_ttft_ms", "long", "ttft_p50_ms", "ms", "lower", 3000),
    Reported("e2e.repeat", "repeat", "tok_s", "tok/s", "higher"),
    Reported("e2e.repeat8", "repeat8", "tok_s", "tok/s", "higher"),
    Reported("e2e.mixed_itl_p99_ms", "mixed", "itl_p99_ms", "ms", "lower", 150),
)

INT8_TARGETS = {"single": 140.0}


@contextlib.contextmanager
def server(*options: str) -> Iterator[tuple[str, str]]:
    """`nexuskv up` on free ports; its URL and model."""
    with tempfile.TemporaryDirectory() as journal:
        command = [sys.executable, "-m", "services.cli", "up", "--http-port", "0", "--grpc-port", "0"]
        command += ["--journal", journal, "--log-level", "warning", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            ready = re.match(r"ready http=(\S+) grpc=\S+ model=(\S+)", process.stdout.readline())
            if ready is None:
                raise RuntimeError("the server did not start")
            yield ready[1], ready[2]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def run(workload: str, *options: str) -> dict[str, Any]:
    with server(*options) as (url, model):
        return asyncio.run(measure_server(url, model, workload))


def measure() -> list[dict[str, Any]]:
    figures = []
    with_drafts: dict[str, dict[str, Any]] = {}
    for r in REPORTED:
        with_drafts[r.workload] = measured = run(r.workload)
        figures.append(figure(r.figure, measured[r.key], r.unit, r.better, r.target))
    for r in REPORTED:
        measured = run(r.workload, "--weights", "int8")
        target = INT8_TARGETS.get(r.workload)
        figures.append(figure(f"{r.figure}.int8", measured[r.key], r.unit, r.better, target))
    return figures + _speculation(with_drafts)


def _speculation(with_drafts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The same server without drafts beside it."""

    def ratio(workload: str) -> float:
        plain: float = run(workload, "--speculation", "off")["tok_s"]
        faster: float = with_drafts[workload]["tok_s"]
        return faster / plain

    again: float = run("seen")["again_tok_s"]
    first: float = run("seen", "--speculation", "off")["first_tok_s"]
    return [
        figure("spec.repeat_speedup", ratio("repeat"), "x", "higher", 3.0),
        figure("spec.repeat8_speedup", ratio("repeat8"), "x", "higher", 1.6),
        figure("spec.repeat_seen_speedup", again / first, "x", "higher", 4.0),
        figure("spec.free_text_ratio", ratio("single"), "x", "higher", 0.98),
        figure("spec.free_text_ratio.conc16", ratio("conc16"), "x", "higher", 0.98),
    ]
