"""Reading a pool without touching it."""

import numpy as np

from memory_manager.core.inspect import inspect
from memory_manager.engine_pool import EnginePool
from memory_manager.views import BlockDelta, BlockSnapshot, EngineStats, TenantStats

_ATTEMPTS = 3


def inspect_blocks(engine: EnginePool) -> BlockSnapshot:
    """A picture of every block; any thread may ask.

    When updates interfere each time, the last picture mixes two moments; the next one puts that right.
    """
    for _ in range(_ATTEMPTS):
        version = engine.version
        snapshot = _picture(engine, version)
        if version % 2 == 0 and engine.version == version:
            break
    return snapshot


def _picture(engine: EnginePool, version: int) -> BlockSnapshot:
    size = engine.num_blocks
    pool, arrays = engine.tables.current
    tenants = [""] * pool.tenants.size
    for name, row in list(engine.tables.tenants.rows.items()):
        if row < len(tenants):
            tenants[row] = name
    snapshot = BlockSnapshot(
        engine_id=engine.engine_id,
        snapshot_seq=version // 2,
        states=np.empty(size, np.uint8),
        num_users=np.zeros(size, np.int32),
        depths=np.empty(size, np.int32),
        owners=np.empty(size, np.int32),
        tenants=tuple(tenants),
        parents=np.empty(size, np.int32),
    )
    inspect(
        arrays,
        snapshot.states,
        snapshot.num_users,
        snapshot.depths,
        snapshot.owners,
        snapshot.parents,
    )
    return snapshot


def delta_between(old: BlockSnapshot, new: BlockSnapshot) -> BlockDelta | None:
    """What changed from one picture of a pool to the next; None when a viewer needs the new one whole."""
    if old.states.size != new.states.size or old.tenants != new.tenants:
        return None
    changed = (
        (old.states != new.states)
        | (old.num_users != new.num_users)
        | (old.depths != new.depths)
        | (old.owners != new.owners)
    )
    blocks = np.flatnonzero(changed).astype(np.int32)
    return BlockDelta(
        from_seq=old.snapshot_seq,
        to_seq=new.snapshot_seq,
        blocks=blocks,
        states=new.states[blocks],
        num_users=new.num_users[blocks],
        depths=new.depths[blocks],
        owners=new.owners[blocks],
    )


def engine_stats(engine: EnginePool) -> EngineStats:
    pool = engine.tables.pool
    counted = [name for name in EngineStats.__dataclass_fields__ if name in (pool.counters.dtype.names or ())]
    return EngineStats(
        engine_id=engine.engine_id,
        epoch=engine.epoch,
        model_fingerprint=engine.model_fingerprint,
        num_blocks=engine.num_blocks,
        tenants=tuple(_tenant_stats(engine, tenant) for tenant in engine.tables.tenants.rows),
        **{name: int(pool.counters[name][0]) for name in counted},
    )


def _tenant_stats(engine: EnginePool, tenant: str) -> TenantStats:
    entry = engine.tables.pool.tenants[engine.tables.tenants.rows[tenant]]
    limits = engine.tables.limits(tenant)
    return TenantStats(
        tenant=tenant,
        num_blocks=int(entry["charged"]),
        num_pinned=int(entry["pinned"]),
        quota=limits.quota,
        floor=limits.floor,
        num_evictions=int(entry["num_evictions"]),
    )


def state_bytes(engine: EnginePool) -> int:
    return sum(array.nbytes for array in engine.tables.pool)
