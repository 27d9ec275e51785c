"""What a floor is for: a tenant's prefix outlasts another's flood."""

import random

import pytest

from engine.sequence import Request, SamplingParams
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
