"""Cached prefixes as such: found, pinned, forgotten."""

from typing import NamedTuple

import numpy as np

from memory_manager.core.blocks import put_back
from memory_manager.core.changes import REMOVED, log_change
from memory_manager.core.edges import remove_edge
from memory_manager.core.ghosts import EvictionCause, remember
from memory_manager.core.handle import open_pool
from memory_manager.core.hashing import chain_paths
from memory_manager.core.holds import drop_hold, hold
from memory_manager.core.jit import inner, kernel
from memory_manager.core.layout import BLOCK_SIZE, DETACHED, FENCED, FREE, NONE, READY, Array, Pool
from memory_manager.core.order import is_linked, unlink
from memory_manager.core.trie import count_ready, match, retract


class Prefix(NamedTuple):
    num_blocks: int
    node: int  # the deepest block, or the root


@kernel
def find_prefix(arrays: Array, root: int, tokens: Array, limit: int) -> tuple[int, int]:
    """The fields of Prefix: the longest READY path along `tokens`, at most `limit` blocks. Reads only."""
    pool: Pool = open_pool(arrays)
    paths = np.empty(limit, np.uint64)
    blocks = np.empty(limit, np.int32)
    chain_paths(pool, root, tokens, paths)
    num_blocks = count_ready(pool, blocks, match(pool, root, tokens, paths, limit, blocks))
    return num_blocks, blocks[num_blocks - 1] if num_blocks > 0 else pool.nodes.size + root


@kernel
def pin(arrays: Array, tenant: int, node: int, num_blocks: int) -> None:
    pool: Pool = open_pool(arrays)
    hold(pool, node)
    pool.tenants[tenant].pinned += num_blocks


@kernel
def unpin(arrays: Array, tenant: int, node: int, num_blocks: int) -> None:
    pool: Pool = open_pool(arrays)
    drop_hold(pool, node)
    pool.tenants[tenant].pinned -= num_blocks


@kernel
def purge(arrays: Array, in_scope: Array) -> tuple[int, int]:
    """Forgets all cached blocks of the namespaces whose roots are in scope (bool[R]).

    Answers how many were freed and how many detached.

    Blocks that somebody holds lose their edge now and are freed with the last holder. Sequences of these
    namespaces share nothing they compute from now on: it may rest on what was forgotten.
    """
    pool: Pool = open_pool(arrays)
    for row in range(pool.sequences.size):
        sequence = pool.sequences[row]
        if sequence.sequence_id != 0 and in_scope[sequence.root]:
            retract(pool, sequence.first)
            sequence.seals = False
    roots = np.full(pool.nodes.size, NONE, np.int32)
    num_freed = num_detached = 0
    for block in range(pool.nodes.size):
        if pool.state[block] == READY and in_scope[_root_of(pool, block, roots)]:
            if pool.nodes[block].refs > 0:
                num_detached += 1
            else:
                num_freed += 1
    for block in range(pool.nodes.size):
        if roots[block] != NONE and in_scope[roots[block]] and pool.state[block] == READY:
            _forget(pool, block)
    _wipe_unused_tokens(pool)
    return num_freed, num_detached


@inner
def _root_of(pool: Pool, block: int, roots: Array) -> int:
    """The block's root; `roots` (int32[N]) remembers it for all blocks on the way."""
    num_blocks = pool.nodes.size
    node = block
    while node < num_blocks and roots[node] == NONE:
        node = pool.nodes[node].parent
    root = node - num_blocks if node >= num_blocks else roots[node]
    node = block
    while node < num_blocks and roots[node] == NONE:
        roots[node] = root
        node = pool.nodes[node].parent
    return root


@inner
def _wipe_unused_tokens(pool: Pool) -> None:
    for block in range(pool.nodes.size):
        if pool.state[block] == FREE or pool.state[block] == FENCED:
            pool.tokens[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 0
    for row in range(pool.sequences.size):
        sequence = pool.sequences[row]
        if sequence.sequence_id != 0:
            block, offset = sequence.cursor, sequence.num_tokens % BLOCK_SIZE
            while block != NONE:
                pool.tokens[block * BLOCK_SIZE + offset : (block + 1) * BLOCK_SIZE] = 0
                block, offset = pool.next[block], 0


@inner
def _forget(pool: Pool, block: int) -> None:
    """A READY block without holders is given back, one with holders detached."""
    counters = pool.counters
    remove_edge(pool, block)
    remember(pool, block, EvictionCause.PURGED.value, NONE)
    log_change(pool, block, REMOVED)
    if is_linked(pool, block):
        unlink(pool, block)
    if pool.nodes[block].refs > 0:
        pool.state[block] = DETACHED
        return
    parent = pool.nodes[block].parent
    if parent < pool.nodes.size:
        pool.nodes[parent].children -= 1
    else:
        pool.roots[parent - pool.nodes.size].children -= 1
    tenant = pool.owner[block]
    pool.tenants[tenant].charged -= 1
    pool.tenants[tenant].evictable -= 1
    counters[0].num_evictable -= 1
    counters[0].num_ready -= 1
    put_back(pool, block, counters[0].launched_step)
