"""Requests that arrive together with the same cold prefix compute it once, whoever of them leaves."""

import asyncio
import random

import httpx
import pytest

from tests.e2e.system import System, wait_until

NUM_REQUESTS, NUM_TAIL = 16, 20


def prompts(seed: int, num_prefix: int) -> list[list[int]]:
    rng = random.Random(seed)
    prefix, *tails = ([rng.randrange(1000, 40_000) for _ in range(n)] for n in (num_prefix, *[NUM_TAIL] * 16))
    return [prefix + tail for tail in tails]


async def complete(client: httpx.AsyncClient, system: System, prompt: list[int]) -> int:
    """The number of cached tokens."""
    body = {"model": system.model, "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
    response = await client.post(f"{system.http}/v1/completions", json=body, timeout=240)
    assert response.status_code == 200, response.text
    cached: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def num_computed(system: System) -> float:
    return system.metric("nexuskv_prefill_tokens_total")


async def test_sixteen_cold_requests_compute_their_prefix_once(calm_system: System) -> None:
    before = num_computed(calm_system)
    async with httpx.AsyncClient() as client:
        cached = await asyncio.gather(*(complete(client, calm_system, p) for p in prompts(1, 900)))
    assert sorted(cached) == [0] + [896] * 15
    once = 900 + NUM_TAIL + 15 * NUM_TAIL
    assert num_computed(calm_system) - before <= 1.1 * once


@pytest.mark.timeout(400)
async def test_a_leader_that_leaves_in_the_middle_delays_the_others_and_nothing_more(
    calm_system: System,
) -> None:
    leaders, *others = prompts(2, 1200)
    before = num_computed(calm_system)
    async with httpx.AsyncClient() as client:
        leader = asyncio.create_task(complete(client, calm_system, leaders))
        await asyncio.to_thread(wait_until, lambda: num_computed(calm_system) > before, 60, "no prefill")
        followers = [asyncio.create_task(complete(client, calm_system, prompt)) for prompt in others]

        def all_wait() -> bool:
            return calm_system.metric("nexuskv_waiting_acquires") == len(others)

        await asyncio.to_thread(wait_until, all_wait, 60, "the followers do not wait")
        assert not leader.done()
        leader.cancel()
        assert num_computed(calm_system) - before < 1200
        cached = await asyncio.gather(*followers)
    # One of them goes on where the leader was, the others find everything.
    assert sorted(cached)[1:] == [1200] * 14
    once = 1200 + len(others) * NUM_TAIL
    assert num_computed(calm_system) - before <= 1.1 * once + 512  # the step that ran when it left
