"""Settings of a memory manager."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class TenantLimits:
    """Blocks of one engine's pool."""

    quota: int | None = None  # at most so many charged to the tenant; None: the whole pool
    floor: int = 0  # so many that other tenants cannot evict
    pin_cap: int | None = None  # at most so many pinned; None: a quarter of the pool


@dataclass(frozen=True)
class JournalConfig:
    """Everything is given to the operating system before it is answered: a killed process loses nothing.

    `fsync` says when the disk must have it, for the case that the machine goes down.
    """

    directory: Path
    fsync: Literal["always", "interval", "never"] = "interval"
    fsync_interval_ms: int = 1_000
    # The journal is rewritten as a snapshot when its tail is longer than this and than the snapshot.
    compact_bytes: int = 64 << 20
    # Several calls may share one write: then the owner calls `commit` before it answers them.
    group_commit: bool = False


@dataclass(frozen=True)
class MemoryConfig:
    lease_ms: int = 10_000
    heartbeat_interval_ms: int = 2_000
    # A shorter overlap with a prefix that is being computed is not worth waiting for.
    min_wait_blocks: int = 4
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    default_limits: TenantLimits = TenantLimits()
    # Which cached leaf goes first: the one least recently used, or the one let go first of all.
    eviction: Literal["lru", "fifo"] = "lru"
    # Tokens of past prompts and outputs that are kept to draft from, in all namespaces; 0: none.
    draft_index_tokens: int = 1 << 20
    journal: JournalConfig | None = None
