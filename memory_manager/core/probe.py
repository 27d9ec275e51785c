"""Single lookups for whoever examines a pool from Python."""

# mypy: no-warn-return-any

from typing import Any

import numpy as np

from memory_manager.core import edges, hashing, rows
from memory_manager.core.handle import open_pool
from memory_manager.core.jit import kernel
from memory_manager.core.layout import BLOCK_SIZE, Array, Pool


@kernel
def row_of(arrays: Array, sequence_id: int) -> int:
    """The row that the index gives for a sequence, or NONE."""
    pool: Pool = open_pool(arrays)
    return rows.find_row(pool, sequence_id)


@kernel
def block_like(arrays: Array, block: int) -> int:
    """The block that is found for this one's hash, parent and tokens, or NONE."""
    pool: Pool = open_pool(arrays)
    node = pool.nodes[block]
    return edges.find_block(pool, node.edge_hash, node.parent, pool.tokens, block * BLOCK_SIZE)


@kernel
def path_below(arrays: Array, path: np.uint64, block: int) -> Any:
    """uint64, the path hash of a block below a node with the given one."""
    pool: Pool = open_pool(arrays)
    return hashing.extend_path(path, pool.tokens, block * BLOCK_SIZE, pool.secret)


@kernel
def hash_of_edge(path: np.uint64) -> Any:
    """uint32, the edge hash of a block with this path hash."""
    return hashing.edge_hash(path)
