"""Holds. A sequence (or a pin) holds one node: the deepest it uses.

`refs` counts direct holds and referenced children, so a held node keeps its whole path referenced; the
count travels up only when it changes between 0 and 1. Blocks with refs == 0 can be evicted, leaf first.
"""

from memory_manager.core.blocks import put_back
from memory_manager.core.jit import inner
from memory_manager.core.layout import DETACHED, Pool
from memory_manager.core.order import is_linked, link_by_age, move_to_newest


@inner
def hold(pool: Pool, node: int) -> None:
    num_blocks = pool.nodes.size
    while node < num_blocks:
        pool.nodes[node].refs += 1
        if pool.nodes[node].refs > 1:
            break
        pool.tenants[pool.owner[node]].evictable -= 1
        pool.counters[0].num_evictable -= 1
        node = pool.nodes[node].parent


@inner
def unhold(pool: Pool, node: int) -> None:
    """Ends a hold without counting as a use."""
    num_blocks = pool.nodes.size
    while node < num_blocks:
        pool.nodes[node].refs -= 1
        if pool.nodes[node].refs > 0:
            break
        parent = pool.nodes[node].parent
        if pool.state[node] == DETACHED:
            _free_detached(pool, node)
        else:
            pool.tenants[pool.owner[node]].evictable += 1
            pool.counters[0].num_evictable += 1
        node = parent


@inner
def take_back_hold(pool: Pool, node: int) -> None:
    """Undoes `hold`. The node may have left the eviction order while it was held."""
    unhold(pool, node)
    if node < pool.nodes.size and pool.nodes[node].refs == 0 and pool.nodes[node].children == 0:
        if not is_linked(pool, node):
            link_by_age(pool, node)


@inner
def drop_hold(pool: Pool, node: int) -> None:
    """Ends a use: the node is now the most recently used of its owner, unless ages are kept."""
    if node < pool.nodes.size:
        counters = pool.counters
        pool.nodes[node].fence_step = counters[0].launched_step
        keeps_age = counters[0].fifo and pool.nodes[node].last_used > 0
        if not keeps_age:
            counters[0].tick += 1
            pool.nodes[node].last_used = counters[0].tick
        if pool.state[node] != DETACHED:
            if not keeps_age:
                move_to_newest(pool, node)
            elif not is_linked(pool, node):
                link_by_age(pool, node)
        unhold(pool, node)


@inner
def _free_detached(pool: Pool, block: int) -> None:
    parent = pool.nodes[block].parent
    if parent < pool.nodes.size:
        pool.nodes[parent].children -= 1
        if pool.nodes[parent].fence_step < pool.nodes[block].fence_step:
            pool.nodes[parent].fence_step = pool.nodes[block].fence_step
    else:
        pool.roots[parent - pool.nodes.size].children -= 1
    pool.tenants[pool.owner[block]].charged -= 1
    pool.counters[0].num_ready -= 1
    put_back(pool, block, pool.nodes[block].fence_step)
