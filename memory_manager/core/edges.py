"""The edge table: (parent, tokens) → block. Open addressing, linear probing, deletion by backward shift.

At most one edge leads to a block, so the load never exceeds one half.
"""

# mypy: no-warn-return-any

from typing import Any

import numpy as np

from memory_manager.core.indices import index
from memory_manager.core.jit import inner
from memory_manager.core.layout import BLOCK_SIZE, NONE, Array, Pool


@inner
def home_slot(edge_hash: np.uint32, num_slots: int) -> Any:
    """Maps the hash range onto the table by multiplication, so the size need not be a power of two."""
    return np.int64((np.uint64(edge_hash) * np.uint64(num_slots)) >> np.uint64(32))


@inner
def same_tokens(left: Array, left_start: int, right: Array, right_start: int) -> bool:
    difference = np.int32(0)
    for i in range(index(BLOCK_SIZE)):
        difference |= left[index(left_start) + i] ^ right[index(right_start) + i]
    return difference == 0


@inner
def find_block(pool: Pool, edge_hash: np.uint32, parent: int, tokens: Array, start: int) -> int:
    """The block below `parent` that holds `tokens[start : start + 16]`, or NONE."""
    edges = pool.edges
    slot = home_slot(edge_hash, edges.size)
    while edges[slot].block != NONE:
        if edges[slot].edge_hash == edge_hash:
            block = edges[slot].block
            if pool.nodes[index(block)].parent == parent and same_tokens(
                pool.tokens, block * BLOCK_SIZE, tokens, start
            ):
                return block
        slot += 1
        if slot == edges.size:
            slot = 0
    return NONE


@inner
def insert_edge(pool: Pool, block: int) -> None:
    """Adds the edge to a block whose parent, edge_hash and tokens are set; there must be no equal one."""
    edges = pool.edges
    edge_hash = pool.nodes[block].edge_hash
    slot = home_slot(edge_hash, edges.size)
    while edges[slot].block != NONE:
        slot += 1
        if slot == edges.size:
            slot = 0
    edges[slot].edge_hash = edge_hash
    edges[slot].block = block


@inner
def remove_edge(pool: Pool, block: int) -> None:
    edges = pool.edges
    size = edges.size
    hole = home_slot(pool.nodes[block].edge_hash, size)
    while edges[hole].block != block:
        hole += 1
        if hole == size:
            hole = 0
    slot = hole
    while True:
        slot += 1
        if slot == size:
            slot = 0
        if edges[slot].block == NONE:
            break
        home = home_slot(edges[slot].edge_hash, size)
        # An entry may fill the hole unless its home lies behind it (cyclically).
        behind = hole < home <= slot if hole < slot else home > hole or home <= slot
        if not behind:
            edges[hole].edge_hash = edges[slot].edge_hash
            edges[hole].block = edges[slot].block
            hole = slot
    edges[hole].block = NONE
