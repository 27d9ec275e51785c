"""Making room: which cached blocks go when the free ones do not suffice.

Planned first, committed after: victims leave the trie's counts and the eviction order one by one, leaf
first, and are put back exactly when the plan does not reach its goal.
"""

# mypy: no-warn-return-any

import numpy as np

from memory_manager.core.blocks import put_back
from memory_manager.core.changes import REMOVED, log_change
from memory_manager.core.edges import remove_edge
from memory_manager.core.ghosts import EvictionCause, remember
from memory_manager.core.jit import inner
from memory_manager.core.layout import NONE, Array, Pool
from memory_manager.core.order import is_linked, link_after, link_by_age, oldest_leaf, unlink

_VICTIM = np.dtype(
    [("block", np.int32), ("parent_last_used", np.int64), ("parent_fence_step", np.int64)], align=True
)


@inner
def reserve(pool: Pool, tenant: int, num_wanted: int, partial: bool) -> int:
    """Sees to it that the tenant can take `num_wanted` free blocks; evicts what that needs.

    Answers how many it can take: all or, unless `partial`, none (then nothing has changed).
    At its quota, a tenant's own cached blocks go first.
    """
    headroom = pool.tenants[tenant].quota - pool.tenants[tenant].charged
    num_free = pool.counters[0].num_free
    if num_wanted <= headroom and num_wanted <= num_free:
        return num_wanted
    if not partial and num_wanted > num_free + pool.counters[0].num_evictable:
        return 0
    most_victims = min(num_wanted - min(headroom, 0), pool.counters[0].num_evictable)
    victims = np.empty(most_victims, _VICTIM)
    share = _fair_share(pool)
    num_victims = 0
    allowed = headroom
    while allowed < num_wanted and _has_evictable(pool, tenant):
        _plan(pool, oldest_leaf(pool, tenant), victims, num_victims)
        num_victims += 1
        allowed += 1
    num_for_quota = num_victims
    allowed = min(allowed, num_wanted)
    while num_free + num_victims < allowed:
        block = _next_victim(pool, tenant, share)
        if block == NONE:
            break
        _plan(pool, block, victims, num_victims)
        num_victims += 1
    granted = max(0, min(allowed, num_free + num_victims))
    if granted < num_wanted and not partial:
        for i in range(num_victims - 1, -1, -1):
            _unplan(pool, victims, i)
        return 0
    for i in range(num_victims):
        block = victims[i].block
        if i < num_for_quota:
            cause = EvictionCause.QUOTA.value
        elif pool.owner[block] == tenant:
            cause = EvictionCause.OWN_PRESSURE.value
        else:
            cause = EvictionCause.SHARED_PRESSURE.value
        _evict(pool, block, cause, tenant)
    return granted


@inner
def _fair_share(pool: Pool) -> int:
    """Blocks each tenant would have if those that have any shared the pool evenly."""
    num_active = 0
    for tenant in range(pool.tenants.size):
        if pool.tenants[tenant].charged > 0:
            num_active += 1
    return pool.nodes.size // max(num_active, 1)


@inner
def _has_evictable(pool: Pool, tenant: int) -> bool:
    """Whether the tenant has a leaf to give that no launched step may still read."""
    block = oldest_leaf(pool, tenant)
    return block != NONE and pool.nodes[block].fence_step <= pool.counters[0].completed_step


@inner
def _next_victim(pool: Pool, requester: int, share: int) -> int:
    """The least recently used leaf of the tenants above their share; if these have none, of all.

    A tenant's floor is out of reach for others.
    """
    best, best_is_over = NONE, False
    for tenant in range(pool.tenants.size):
        charged, floor = pool.tenants[tenant].charged, pool.tenants[tenant].floor
        if charged == 0 or (charged <= floor and tenant != requester) or not _has_evictable(pool, tenant):
            continue
        block = pool.tenants[tenant].oldest
        is_over = charged > max(share, floor)
        older = best == NONE or pool.nodes[block].last_used < pool.nodes[best].last_used
        if (is_over and not best_is_over) or (is_over == best_is_over and older):
            best, best_is_over = block, is_over
    return best


@inner
def _plan(pool: Pool, block: int, victims: Array, index: int) -> None:
    """Takes a leaf out of order and counts. Its parent inherits its age before it can be a leaf itself."""
    nodes = pool.nodes
    unlink(pool, block)
    pool.tenants[pool.owner[block]].charged -= 1
    pool.tenants[pool.owner[block]].evictable -= 1
    pool.counters[0].num_evictable -= 1
    parent = nodes[block].parent
    victims[index].block = block
    if parent >= nodes.size:
        pool.roots[parent - nodes.size].children -= 1
        return
    victims[index].parent_last_used = nodes[parent].last_used
    victims[index].parent_fence_step = nodes[parent].fence_step
    nodes[parent].children -= 1
    nodes[parent].fence_step = max(nodes[parent].fence_step, nodes[block].fence_step)
    if nodes[parent].last_used < nodes[block].last_used:
        nodes[parent].last_used = nodes[block].last_used
        if is_linked(pool, parent):
            unlink(pool, parent)
    if nodes[parent].refs == 0 and nodes[parent].children == 0 and not is_linked(pool, parent):
        link_by_age(pool, parent)


@inner
def _unplan(pool: Pool, victims: Array, index: int) -> None:
    nodes = pool.nodes
    block = victims[index].block
    parent = nodes[block].parent
    if parent >= nodes.size:
        pool.roots[parent - nodes.size].children += 1
    else:
        if nodes[parent].children == 0 and nodes[parent].refs == 0:
            unlink(pool, parent)
        nodes[parent].children += 1
        nodes[parent].last_used = victims[index].parent_last_used
        nodes[parent].fence_step = victims[index].parent_fence_step
    pool.tenants[pool.owner[block]].charged += 1
    pool.tenants[pool.owner[block]].evictable += 1
    pool.counters[0].num_evictable += 1
    link_after(pool, block, NONE)


@inner
def _evict(pool: Pool, block: int, cause: int, requester: int) -> None:
    remove_edge(pool, block)
    remember(pool, block, cause, requester)
    log_change(pool, block, REMOVED)
    pool.tenants[pool.owner[block]].num_evictions += 1
    pool.counters[0].num_evictions += 1
    pool.counters[0].num_ready -= 1
    put_back(pool, block, pool.nodes[block].fence_step)
