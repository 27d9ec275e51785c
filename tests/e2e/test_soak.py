"""The system under a mixed random load, for a minute in the suite and for longer in `make soak`."""

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.random_load import RandomLoad
from tests.e2e.system import System, running_system

LONG = [pytest.mark.slow, pytest.mark.timeout(2400)]
PROCESSES = ("memory-manager", "engine", "frontend")
SAMPLE_S = 0.5
# Resident memory after the warm-up may differ by this: freed memory that the allocators keep.
MEMORY_TOLERANCE = 1.05
MEMORY_TOLERANCE_BYTES = 8 << 20


@contextlib.asynccontextmanager
async def resident_memory(system: System) -> AsyncIterator[dict[str, list[int]]]:
    """Samples of each process's resident bytes, taken while inside."""
    processes = {name: system.child(name) for name in PROCESSES}
    samples: dict[str, list[int]] = {name: [] for name in PROCESSES}

    async def sample() -> None:
        while True:
            for name, process in processes.items():
                samples[name].append(process.memory_info().rss)
            await asyncio.sleep(SAMPLE_S)

    sampling = asyncio.create_task(sample())
    try:
        yield samples
    finally:
        sampling.cancel()


def assert_flat(name: str, samples: list[int]) -> None:
    """The medians of the second and the last quarter are as good as equal."""
    quarter = len(samples) // 4
    early, late = (statistics.median(part) for part in (samples[quarter : 2 * quarter], samples[-quarter:]))
    assert late <= early * MEMORY_TOLERANCE + MEMORY_TOLERANCE_BYTES, (
        f"the {name} grew from {early / 1e6:.0f} to {late / 1e6:.0f} MB"
    )


async def soak(system: System, duration_s: float, seed: int) -> None:
    load = RandomLoad(system, seed)
    pids = [system.child(name).pid for name in PROCESSES]
    async with resident_memory(system) as samples:
        await load.run(duration_s)
    await asyncio.to_thread(system.wait_idle)
    assert [system.child(name).pid for name in PROCESSES] == pids, "a process was restarted"
    assert system.integrity_violations() == []
    for name in PROCESSES:
        assert_flat(name, samples[name])
    assert all(load.seen[what] > 0 for what in ("stop", "length", "abort", "left")), load.seen
    assert system.metric("vllm:num_preemptions_total") > 0


@pytest.mark.parametrize(
    ("duration_s", "speculation"),
    [
        pytest.param(60, "on", marks=pytest.mark.timeout(600)),
        pytest.param(1800, "on", marks=LONG),
        pytest.param(1800, "off", marks=LONG),
    ],
)
async def test_mixed_load(tmp_path: Path, duration_s: float, speculation: str) -> None:
    options = ("--kv-blocks", "128", "--speculation", speculation)
    with running_system(tmp_path / "log", *options) as system:
        await soak(system, duration_s, seed=1)
