"""Reading a pool without touching it."""

import numpy as np

from memory_manager.columns import Int32s
from memory_manager.core.inspect import count_users
from memory_manager.core.layout import (
    DETACHED,
    FENCED,
    FREE,
    NONE,
    PENDING,
    PRIVATE,
    QUARANTINED,
    READY,
)
from memory_manager.engine_pool import EnginePool
from memory_manager.views import BlockSnapshot, EngineStats, TenantStats

# How a state is reported: whether a block has an edge is the trie's own business.
_REPORTED = np.zeros(7, np.uint8)
_REPORTED[[FREE, PRIVATE, READY, FENCED, QUARANTINED, PENDING, DETACHED]] = [0, 1, 2, 3, 4, 1, 2]


def inspect_blocks(engine: EnginePool) -> BlockSnapshot:
    pool = engine.pool
    in_trie = (pool.state == READY) | (pool.state == DETACHED)
    owned = in_trie | (pool.state == PRIVATE) | (pool.state == PENDING)
    parents = pool.nodes["parent"]
    tenants = [""] * pool.tenants.size
    for name, row in engine.tenants.rows.items():
        tenants[row] = name
    return BlockSnapshot(
        engine_id=engine.engine_id,
        snapshot_seq=int(pool.counters["calls"][0]),
        states=_REPORTED[pool.state],
        num_users=num_users(engine),
        depths=np.where(in_trie, pool.nodes["depth"], 0),
        owners=np.where(owned, pool.owner, NONE),
        tenants=tuple(tenants),
        parents=np.where(in_trie & (parents < engine.num_blocks), parents, NONE),
    )


def num_users(engine: EnginePool) -> Int32s:
    """int32[N], how many sequences have each block in their page table."""
    users: Int32s = np.zeros(engine.num_blocks, np.int32)
    count_users(engine.handle, users)
    return users


def engine_stats(engine: EnginePool) -> EngineStats:
    counters = engine.pool.counters[0]
    names = [
        name for name in EngineStats.__dataclass_fields__ if name in (engine.pool.counters.dtype.names or ())
    ]
    return EngineStats(
        engine_id=engine.engine_id,
        epoch=engine.epoch,
        model_fingerprint=engine.model_fingerprint,
        num_blocks=engine.num_blocks,
        tenants=tuple(_tenant_stats(engine, tenant) for tenant in engine.tenants.rows),
        **{name: int(counters[name]) for name in names},
    )


def _tenant_stats(engine: EnginePool, tenant: str) -> TenantStats:
    entry = engine.pool.tenants[engine.tenants.rows[tenant]]
    limits = engine.limits(tenant)
    return TenantStats(
        tenant=tenant,
        num_blocks=int(entry["charged"]),
        num_pinned=int(entry["pinned"]),
        quota=limits.quota,
        floor=limits.floor,
        num_evictions=int(entry["num_evictions"]),
    )


def state_bytes(engine: EnginePool) -> int:
    return sum(array.nbytes for array in engine.pool)
