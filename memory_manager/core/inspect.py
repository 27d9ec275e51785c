"""Counting users of blocks, off the hot path."""

import numpy as np

from memory_manager.core.handle import PoolHandle
from memory_manager.core.jit import inner, kernel
from memory_manager.core.layout import DETACHED, NONE, READY, Array, Pool


@kernel
def count_users(handle: PoolHandle, users: Array) -> None:
    """Adds to `users` (int32[N], zeros) the sequences that have each block in their page table."""
    pool = handle.pool
    num_blocks = pool.nodes.size
    for row in range(pool.sequences.size):
        sequence = pool.sequences[row]
        if sequence.sequence_id != 0:
            block = sequence.first
            while block != NONE:
                users[block] = 1
                block = pool.next[block]
            if sequence.node < num_blocks:
                users[sequence.node] += 1
    _carry_up(pool, users)


@inner
def _carry_up(pool: Pool, users: Array) -> None:
    """Adds every node's users to its parent's, deepest nodes first."""
    num_blocks = pool.nodes.size
    by_depth = np.full(num_blocks + 1, NONE, np.int32)  # per depth the head of a chain of nodes
    following = np.empty(num_blocks, np.int32)
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
            users[pool.nodes[block].parent] += users[block]
            block = following[block]
