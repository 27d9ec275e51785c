"""The edge table, made anew from the states of the blocks."""

from memory_manager.core.edges import insert_edge
from memory_manager.core.handle import open_pool
from memory_manager.core.jit import kernel
from memory_manager.core.layout import NONE, PENDING, READY, Array, Pool


@kernel
def rebuild_edges(arrays: Array) -> None:
    pool: Pool = open_pool(arrays)
    for slot in range(pool.edges.size):
        pool.edges[slot].block = NONE
    for block in range(pool.nodes.size):
        if pool.state[block] == READY or pool.state[block] == PENDING:
            insert_edge(pool, block)
