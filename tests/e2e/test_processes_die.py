"""kill -9 of each process under `nexuskv up`: it comes back, nothing leaks, nobody hangs."""

import asyncio
import random
from collections.abc import Iterator

import httpx
import pytest

from nexuskv_client import Client, FinishReason, UnavailableError
from tests.e2e.system import System, running_system


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("fragile") / "log", "--kv-blocks", "512") as system:
        yield system


@pytest.mark.parametrize("victim", ["memory-manager", "engine", "frontend"])
async def test_a_killed_process_comes_back(fragile: System, victim: str) -> None:
    async def one(i: int) -> str:
        async with Client(fragile.grpc) as client:
            try:
                answer = await client.generate(f"Story {i}", max_tokens=60, ignore_eos=True, deadline_s=120)
            except UnavailableError:
                return "unavailable"
            return str(answer.choices[0].finish_reason)

    requests = [asyncio.create_task(one(i)) for i in range(8)]
    await asyncio.sleep(random.Random(victim).uniform(0.2, 1.0))  # somewhere in the middle of the work
    old = fragile.child(victim)
    old.kill()
    outcomes = await asyncio.gather(*requests)
    assert set(outcomes) <= {str(FinishReason.LENGTH), "unavailable"}
    await asyncio.to_thread(fragile.wait_ready, 120)
    assert fragile.child(victim).pid != old.pid
    body = {"model": fragile.model, "prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}
    response = httpx.post(f"{fragile.http}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 4
    await asyncio.to_thread(fragile.wait_idle, 15)
    assert fragile.integrity_violations() == []
