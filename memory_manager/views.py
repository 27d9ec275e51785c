"""What can be read of a memory manager's state."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memory_manager.columns import Int32s
from memory_manager.core.ghosts import EvictionCause, MissReason


@dataclass(frozen=True, slots=True)
class Registration:
    epoch: int
    lease_ms: int
    heartbeat_interval_ms: int


class EngineMatch(NamedTuple):
    engine_id: str
    num_cached: int  # tokens


@dataclass(frozen=True, slots=True)
class TenantStats:
    tenant: str
    num_blocks: int
    num_pinned: int
    quota: int | None
    floor: int
    num_evictions: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    engine_id: str
    epoch: int
    model_fingerprint: str
    num_blocks: int
    num_free: int
    num_private: int
    num_ready: int
    num_fenced: int
    num_quarantined: int
    num_evictable: int
    num_sequences: int
    num_waiting: int
    num_evictions: int
    num_query_tokens: int
    num_hit_tokens: int
    num_forks: int
    num_coalesced_tokens: int
    num_truncated_blocks: int
    num_replaced_blocks: int
    tenants: tuple[TenantStats, ...]


@dataclass(frozen=True, slots=True)
class Stats:
    engines: tuple[EngineStats, ...]
    bytes_of_state: int
    draft_index_bytes: int
    uptime_s: float
    journal_bytes: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class BlockSnapshot:
    """Every block of one engine's pool, N of them."""

    engine_id: str
    snapshot_seq: int
    states: npt.NDArray[np.uint8]  # [N] 0 FREE 1 PRIVATE 2 READY 3 FENCED 4 QUARANTINED
    num_users: Int32s  # [N] sequences that use the block
    depths: Int32s  # [N] depth in the trie, 0 when not in it
    owners: Int32s  # [N] index into tenants, -1 for none
    tenants: tuple[str, ...]
    parents: Int32s  # [N] parent block, -1 at a root or outside the trie


@dataclass(frozen=True, slots=True, eq=False)
class BlockDelta:
    """The n blocks that changed between two snapshots; `owners` index the older one's tenants."""

    from_seq: int
    to_seq: int
    blocks: Int32s  # [n]
    states: npt.NDArray[np.uint8]  # [n]
    num_users: Int32s  # [n]
    depths: Int32s  # [n]
    owners: Int32s  # [n]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a sequence found in the cache what it found when it was admitted."""

    sequence_id: int
    num_tokens: int
    num_cached: int
    missed_at_block: int
    reason: MissReason
    eviction_cause: EvictionCause | None
    evicted_seconds_ago: float | None  # before the sequence was admitted
    evicted_for_tenant: str | None
    num_more_blocks: int  # blocks after the missed one that would have hit


@dataclass(frozen=True, slots=True)
class Stored:
    """A chain of n blocks entered the cache."""

    blocks: Int32s  # [n]
    tokens: Int32s  # [16 n]
    parent_block: int | None  # of the first; None at a root


@dataclass(frozen=True, slots=True)
class Removed:
    blocks: Int32s


@dataclass(frozen=True, slots=True)
class AllRemoved:
    """The engine's cache is empty now."""


@dataclass(frozen=True, slots=True)
class Event:
    seq: int
    engine_id: str
    change: Stored | Removed | AllRemoved


@dataclass(frozen=True, slots=True)
class Pin:
    pin_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Cleared:
    num_freed: int
    num_detached: int


@dataclass(frozen=True, slots=True)
class Mended:
    quarantined: list[int]  # blocks
    has_ended: bool  # the epoch, because mending was not enough
