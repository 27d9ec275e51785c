"""What limits are for: a tenant's prefix outlasts another's flood, and nobody waits for ever."""

import random
from dataclasses import replace

import pytest

from engine.sequence import FinishReason, Request, SamplingParams
from memory_manager import MemoryConfig, TenantLimits
from tests.engine.harness import Harness

NUM_UNIQUE = 2_000
PREFIX = [i * 7 % 31 for i in range(128)]


def tenant_request(name: str, tenant: str, prompt: list[int]) -> Request:
    return Request(name, prompt, SamplingParams(temperature=0, max_tokens=4), tenant=tenant)


@pytest.mark.parametrize("floor", [9, 0])
def test_a_flood_of_unique_prompts_leaves_a_prefix_under_its_floor_alone(floor: int) -> None:
    """Eight of the flood's prompts need more than the pool has: without a floor the prefix goes."""
    rng = random.Random(0)
    limits = {"quiet": TenantLimits(floor=floor)}
    harness = Harness(num_blocks=32, memory_config=MemoryConfig(tenants=limits))
    harness.run(tenant_request("first", "quiet", [*PREFIX, 5]))
    cached = []
    for start in range(0, NUM_UNIQUE, 100):
        prompts = [[rng.randrange(32) for _ in range(70)] for _ in range(100)]
        harness.run(*(tenant_request(f"flood {start + i}", "flood", p) for i, p in enumerate(prompts)))
        choices = harness.run(tenant_request(f"quiet {start}", "quiet", [*PREFIX, start % 31]))
        cached.append(choices[f"quiet {start}", 0].num_cached)
    assert all(choice.reason is not None and not choice.error for choice in harness.choices.values())
    assert (set(cached) == {128}) == (floor > 0)
    harness.assert_idle_and_clean()


@pytest.mark.parametrize("limits", [{"a": TenantLimits(quota=8)}, {"b": TenantLimits(floor=56)}])
def test_sequences_that_run_into_their_tenants_limit_take_turns(limits: dict[str, TenantLimits]) -> None:
    """The pool has blocks for both, their tenant has not."""
    harness = Harness(num_blocks=64, memory_config=MemoryConfig(tenants=limits))
    if "b" in limits:
        for i in range(7):
            harness.run(tenant_request(f"cached {i}", "b", [i, *(t * (i + 3) % 31 for t in range(128))]))
    prompts = [[i * t % 30 for t in range(49)] for i in (1, 7)]
    requests = [tenant_request(f"r{i}", "a", prompt) for i, prompt in enumerate(prompts)]
    longer = [replace(one, sampling=replace(one.sampling, max_tokens=60)) for one in requests]
    expected = {}
    for one in longer:
        expected.update(Harness().run(one))
    choices = harness.run(*longer)
    for key, choice in expected.items():
        assert (choices[key].tokens, choices[key].reason) == (choice.tokens, choice.reason)
    harness.assert_idle_and_clean()


def test_who_needs_more_than_its_quota_is_told() -> None:
    harness = Harness(num_blocks=64, memory_config=MemoryConfig(tenants={"a": TenantLimits(quota=6)}))
    one = tenant_request("r", "a", [*range(30), *range(19)])
    choice = harness.run(replace(one, sampling=replace(one.sampling, max_tokens=60)))["r", 0]
    assert choice.reason is FinishReason.ABORT
    assert choice.error == "needs 7 blocks, may have 6"
    assert len(choice.tokens) == 6 * 16 + 1 - 49
    harness.assert_idle_and_clean()
