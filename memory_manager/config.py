"""Settings of a memory manager."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TenantLimits:
    """Blocks of one engine's pool."""

    quota: int | None = None  # at most so many charged to the tenant; None: the whole pool
    floor: int = 0  # so many that other tenants cannot evict
    pin_cap: int | None = None  # at most so many pinned; None: a quarter of the pool


@dataclass(frozen=True)
class MemoryConfig:
    lease_ms: int = 10_000
    heartbeat_interval_ms: int = 2_000
    # A shorter overlap with a prefix that is being computed is not worth waiting for.
    min_wait_blocks: int = 4
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    default_limits: TenantLimits = TenantLimits()
