"""The memory manager against a plain Python program that does the same, on random calls."""

import os
import random
from typing import Literal

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from memory_manager import TenantLimits
from tests.memory_manager.random_calls import MIXES, Mix, RandomCalls
from tests.memory_manager.side_by_side import SideBySide

BATCH = 50  # operations a rule
NAMESPACES = [("", ""), ("salt", ""), ("", "adapter"), *((f"salt {i}", "") for i in range(9))]
TENANTS = ["a", "b", "c", *(f"tenant {i}" for i in range(9))]

LIMITS: list[dict[str, TenantLimits]] = [
    {},
    {"a": TenantLimits(quota=12), "b": TenantLimits(floor=6)},
    {"a": TenantLimits(quota=20, floor=7, pin_cap=4), "c": TenantLimits(quota=5, pin_cap=0)},
]


class MemoryManagerMachine(RuleBasedStateMachine):
    """Each rule is a batch of operations of one mix."""

    @initialize(
        num_blocks=st.sampled_from((8, 24, 64, 200)),
        limits=st.sampled_from(LIMITS),
        num_namespaces=st.sampled_from((1, 2, 3, 12)),
        num_tenants=st.sampled_from((1, 2, 3, 12)),
        eviction=st.sampled_from(("lru", "lru", "fifo")),
        seed=st.integers(0, 2**32),
    )
    def start(
        self,
        num_blocks: int,
        limits: dict[str, TenantLimits],
        num_namespaces: int,
        num_tenants: int,
        eviction: Literal["lru", "fifo"],
        seed: int,
    ) -> None:
        self.both = SideBySide(num_blocks, limits, eviction=eviction)
        self.calls = RandomCalls(self.both, seed, TENANTS[:num_tenants], NAMESPACES[:num_namespaces])

    @rule(mix=st.sampled_from(MIXES), num_operations=st.integers(BATCH, 2 * BATCH))
    def batch(self, mix: Mix, num_operations: int) -> None:
        self.calls.run(mix, num_operations)

    @rule(salt=st.sampled_from((None, "", "salt")))
    def clear(self, salt: str | None) -> None:
        self.both.clear(salt)
        self.calls.run(MIXES[0], BATCH)

    @invariant()
    def same_state(self) -> None:
        if hasattr(self, "both"):
            self.both.compare()


MemoryManagerMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMemoryManagerMachine = MemoryManagerMachine.TestCase


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_million_random_operations() -> None:
    """NEXUSKV_MODEL_OPERATIONS sets another number."""
    wanted = int(os.environ.get("NEXUSKV_MODEL_OPERATIONS", "1000000"))
    rng = random.Random(0)
    done = 0
    while done < wanted:
        both = SideBySide(
            rng.choice((8, 24, 64, 200)), rng.choice(LIMITS), eviction=rng.choice(("lru", "lru", "fifo"))
        )
        tenants, namespaces = TENANTS[: rng.choice((1, 2, 3, 12))], NAMESPACES[: rng.choice((1, 2, 3, 12))]
        calls = RandomCalls(both, rng.randrange(2**32), tenants, namespaces)
        for _ in range(20):
            done += calls.run(rng.choice(MIXES), BATCH)
            both.compare()
