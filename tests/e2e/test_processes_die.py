"""kill -9 of each process under `nexuskv up`: it comes back, nothing leaks, nobody hangs."""

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial

import httpx
import pytest

from nexuskv_client import Client, FinishReason, UnavailableError
from tests.e2e.system import System, running_system, wait_until

NUM_STREAMS = 16
MANY_KILLS = 20
Kills = Callable[[System, int, random.Random], Awaitable[None]]
DOCUMENT = "A long document that everybody asks about. " * 40


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("fragile") / "log", "--kv-blocks", "1024") as system:
        yield system


async def story(client: Client, i: int, max_tokens: int) -> str:
    """How it ended: a finish reason, or `unavailable`."""
    try:
        answer = await client.generate(f"Story {i}", max_tokens=max_tokens, ignore_eos=True, deadline_s=120)
    except UnavailableError:
        return "unavailable"
    return str(answer.choices[0].finish_reason)


@contextlib.asynccontextmanager
async def streams(system: System) -> AsyncIterator[Counter[str]]:
    """Inside, NUM_STREAMS are running at any time; counts how they end."""
    outcomes: Counter[str] = Counter()
    leaving = False

    async def stream(i: int) -> None:
        async with Client(system.grpc) as client:
            while not leaving:
                outcomes[await story(client, i, max_tokens=60)] += 1

    async with asyncio.TaskGroup() as group:
        for i in range(NUM_STREAMS):
            group.create_task(stream(i))
        yield outcomes
        leaving = True


async def num_cached(system: System) -> int:
    """Tokens of the document that a request finds cached."""
    async with Client(system.grpc) as client:
        return (await client.generate(DOCUMENT, max_tokens=1)).usage.cached_tokens


def assert_calm(system: System) -> None:
    system.wait_idle(30)
    assert system.integrity_violations() == []


async def kill_memory_managers(system: System, num_kills: int, rng: random.Random) -> None:
    """No stream notices, and what was cached still is."""
    await num_cached(system)
    cached, pool = await num_cached(system), system.pool()
    async with streams(system) as outcomes:
        for _ in range(num_kills):
            await asyncio.sleep(rng.uniform(0.2, 2))
            await asyncio.to_thread(system.kill, "memory-manager")
            assert system.integrity_violations() == []
    assert set(outcomes) == {str(FinishReason.LENGTH)}
    assert system.pool().epoch == pool.epoch
    assert system.pool().num_hit_tokens >= pool.num_hit_tokens
    assert await num_cached(system) == cached > len(DOCUMENT.split()) // 2
    assert_calm(system)


def epoch_is_over(system: System, epoch: int) -> bool:
    return system.pool().epoch != epoch


async def kill_engines(system: System, num_kills: int, rng: random.Random) -> None:
    """All of a dead engine's blocks are free, and nobody is credited with what it had computed."""
    for _ in range(num_kills):
        await num_cached(system)
        epoch = system.pool().epoch
        async with Client(system.grpc) as client:
            stories = [asyncio.create_task(story(client, i, max_tokens=200)) for i in range(NUM_STREAMS)]
            await asyncio.sleep(rng.uniform(0.2, 2))
            await asyncio.to_thread(system.kill, "engine")
            outcomes = await asyncio.gather(*stories)
        assert set(outcomes) <= {str(FinishReason.LENGTH), "unavailable"}
        await asyncio.to_thread(
            wait_until, partial(epoch_is_over, system, epoch), 60, "the old epoch goes on"
        )
        pool = system.pool()
        assert (pool.num_free, pool.num_sequences) == (pool.num_blocks, 0)
        assert await num_cached(system) == 0
        assert_calm(system)


@pytest.mark.parametrize("victim", ["memory-manager", "engine", "frontend"])
async def test_a_killed_process_comes_back(fragile: System, victim: str) -> None:
    rng = random.Random(victim)
    if victim == "memory-manager":
        await kill_memory_managers(fragile, 1, rng)
    elif victim == "engine":
        await kill_engines(fragile, 1, rng)
    else:
        async with Client(fragile.grpc) as client:
            stories = [asyncio.create_task(story(client, i, max_tokens=200)) for i in range(NUM_STREAMS)]
            await asyncio.sleep(rng.uniform(0.2, 1))
            await asyncio.to_thread(fragile.kill, victim)
            assert set(await asyncio.gather(*stories)) == {"unavailable"}
    body = {"model": fragile.model, "prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}
    response = httpx.post(f"{fragile.http}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 4
    await asyncio.to_thread(assert_calm, fragile)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kill_many", [kill_memory_managers, kill_engines])
async def test_many_kills(fragile: System, kill_many: Kills) -> None:
    await kill_many(fragile, MANY_KILLS, random.Random(0))
