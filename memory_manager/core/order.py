"""Eviction order: per tenant a list of READY blocks, least recently used first.

A block enters at the newest end when a hold on it is dropped, and may stay in the list while it is held
or has children again; such entries are dropped when they come up. So holding a block never touches the
list, and every block that can be evicted is in it.
"""

# mypy: no-warn-return-any

from memory_manager.core.jit import inner
from memory_manager.core.layout import NONE, Pool


@inner
def is_linked(pool: Pool, block: int) -> bool:
    return pool.prev[block] != NONE or pool.tenants[pool.owner[block]].oldest == block


@inner
def unlink(pool: Pool, block: int) -> None:
    """Takes a linked block out of its owner's order."""
    before, after = pool.prev[block], pool.next[block]
    tenant = pool.owner[block]
    if before == NONE:
        pool.tenants[tenant].oldest = after
    else:
        pool.next[before] = after
    if after == NONE:
        pool.tenants[tenant].newest = before
    else:
        pool.prev[after] = before
    pool.prev[block] = NONE
    pool.next[block] = NONE


@inner
def link_after(pool: Pool, block: int, before: int) -> None:
    """Puts an unlinked block behind `before`; NONE: at the oldest end."""
    tenant = pool.owner[block]
    if before == NONE:
        after = pool.tenants[tenant].oldest
        pool.tenants[tenant].oldest = block
    else:
        after = pool.next[before]
        pool.next[before] = block
    pool.prev[block] = before
    pool.next[block] = after
    if after == NONE:
        pool.tenants[tenant].newest = block
    else:
        pool.prev[after] = block


@inner
def link_by_age(pool: Pool, block: int) -> None:
    """Puts an unlinked block where its last_used belongs.

    Walks from the oldest end. The block has inherited the age of a leaf that was the oldest of its owner,
    so with one owner along the path the walk ends at once.
    """
    before = NONE
    after = pool.tenants[pool.owner[block]].oldest
    while after != NONE and pool.nodes[after].last_used < pool.nodes[block].last_used:
        before, after = after, pool.next[after]
    link_after(pool, block, before)


@inner
def move_to_newest(pool: Pool, block: int) -> None:
    if is_linked(pool, block):
        unlink(pool, block)
    link_after(pool, block, pool.tenants[pool.owner[block]].newest)


@inner
def oldest_leaf(pool: Pool, tenant: int) -> int:
    """The tenant's least recently used block without holders and children, or NONE."""
    block = pool.tenants[tenant].oldest
    while block != NONE and (pool.nodes[block].refs > 0 or pool.nodes[block].children > 0):
        after = pool.next[block]
        unlink(pool, block)
        block = after
    return block
