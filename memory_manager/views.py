"""What can be read of a memory manager's state."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memory_manager.columns import Int32s


@dataclass(frozen=True, slots=True)
class Registration:
    epoch: int
    lease_ms: int
    heartbeat_interval_ms: int


@dataclass(frozen=True, slots=True)
class EngineMatch:
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


@dataclass(frozen=True, slots=True)
class Pin:
    pin_id: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Cleared:
    num_freed: int
    num_detached: int
