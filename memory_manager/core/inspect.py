"""A picture of all blocks, taken off the hot path.

May run in another thread while the pool changes: then the picture is wrong and must be thrown away, but
every loop ends and every index is in range.
"""

import numpy as np

from memory_manager.core.handle import open_pool
from memory_manager.core.jit import inner, kernel
from memory_manager.core.layout import (
    DETACHED,
    FENCED,
    FREE,
    NONE,
    PENDING,
    PRIVATE,
    QUARANTINED,
    READY,
    Array,
    Pool,
)

# States as they are reported: whether a block has an edge is the trie's own business.
_REPORTED = np.zeros(7, np.uint8)
_REPORTED[[FREE, PRIVATE, READY, FENCED, QUARANTINED, PENDING, DETACHED]] = [0, 1, 2, 3, 4, 1, 2]


@kernel
def inspect(
    arrays: Array,
    states: Array,  # out, uint8[N]
    num_users: Array,  # out, int32[N], zeros
    depths: Array,  # out, int32[N]
    owners: Array,  # out, int32[N]
    parents: Array,  # out, int32[N]
) -> None:
    pool: Pool = open_pool(arrays)
    num_blocks = pool.nodes.size
    for block in range(num_blocks):
        state = _REPORTED[pool.state[block]]
        states[block] = state
        in_trie = state == 2
        parent = pool.nodes[block].parent
        depths[block] = pool.nodes[block].depth if in_trie else 0
        owners[block] = pool.owner[block] if in_trie else NONE
        parents[block] = parent if in_trie and parent < num_blocks else NONE
    _count_users(pool, num_users, owners)


@inner
def _count_users(pool: Pool, users: Array, owners: Array) -> None:
    """Adds the sequences that have each block in their page table, and the owners of private blocks."""
    num_blocks = pool.nodes.size
    for row in range(pool.sequences.size):
        sequence = pool.sequences[row]
        if sequence.sequence_id != 0:
            block = sequence.first
            for _ in range(num_blocks):
                if block == NONE:
                    break
                users[block] = 1
                owners[block] = sequence.tenant
                block = pool.next[block]
            if sequence.node < num_blocks:
                users[sequence.node] += 1
    _carry_up(pool, users)


@inner
def _carry_up(pool: Pool, users: Array) -> None:
    """Adds every node's users to its parent's, deepest nodes first."""
    num_blocks = pool.nodes.size
    by_depth = np.full(num_blocks + 1, NONE, np.int32)  # per depth the head of a chain of nodes
    following = np.full(num_blocks, NONE, np.int32)
    deepest = 0
    for block in range(num_blocks):
        if (pool.state[block] == READY or pool.state[block] == DETACHED) and pool.nodes[block].refs > 0:
            depth = pool.nodes[block].depth
            following[block] = by_depth[depth]
            by_depth[depth] = block
            deepest = max(deepest, depth)
    for depth in range(deepest, 1, -1):
        block = by_depth[depth]
        while block != NONE:
            parent = pool.nodes[block].parent
            if parent < num_blocks:
                users[parent] += users[block]
            block = following[block]
