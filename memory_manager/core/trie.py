"""The radix trie: matching a prompt, announcing blocks that are being computed, sealing written ones.

Along a path from a root there are READY blocks first, then PENDING ones: every indexed block's parent is a
root or indexed itself.
"""

from memory_manager.core.blocks import pop_first, put_back
from memory_manager.core.changes import STORED, log_change
from memory_manager.core.edges import find_block, home_slot, insert_edge, remove_edge
from memory_manager.core.hashing import edge_hash, extend_path
from memory_manager.core.holds import hold, unhold
from memory_manager.core.jit import inner
from memory_manager.core.layout import (
    BLOCK_SIZE,
    NEXT_CALL,
    NONE,
    PENDING,
    PRIVATE,
    READY,
    Array,
    Pool,
)
from memory_manager.core.prefetch import prefetch
from memory_manager.core.waiting import wake_waiters

# How many blocks ahead of the comparison the edge and then the block are fetched.
_EDGE_AHEAD = 16
_BLOCK_AHEAD = 8


@inner
def match(pool: Pool, root: int, tokens: Array, paths: Array, limit: int, blocks: Array) -> int:
    """Walks down from a root along `tokens`, at most `limit` blocks; `paths` are their path hashes.

    Writes the blocks met, READY ones and then PENDING ones, to `blocks` and answers their number. All
    probes are known beforehand, so their memory accesses overlap.
    """
    edges = pool.edges
    parent = pool.nodes.size + root
    for i in range(limit):
        if i + _EDGE_AHEAD < limit:
            prefetch(edges, home_slot(edge_hash(paths[i + _EDGE_AHEAD]), edges.size))
        if i + _BLOCK_AHEAD < limit:
            candidate = edges[home_slot(edge_hash(paths[i + _BLOCK_AHEAD]), edges.size)].block
            if candidate != NONE:
                prefetch(pool.nodes, candidate)
                prefetch(pool.tokens, candidate * BLOCK_SIZE)
        block = find_block(pool, edge_hash(paths[i]), parent, tokens, i * BLOCK_SIZE)
        if block == NONE:
            return i
        blocks[i] = block
        parent = block
    return limit


@inner
def count_ready(pool: Pool, blocks: Array, num_matched: int) -> int:
    """How many of the blocks that `match` found are READY."""
    while num_matched > 0 and pool.state[blocks[num_matched - 1]] != READY:
        num_matched -= 1
    return num_matched


@inner
def announce(pool: Pool, row: int, paths: Array) -> None:
    """Indexes a new sequence's full private blocks as PENDING, down to the first that exists already."""
    sequence = pool.sequences[row]
    block = sequence.first
    parent = sequence.node
    for i in range(sequence.num_sealed, paths.size):
        hashed = edge_hash(paths[i])
        if find_block(pool, hashed, parent, pool.tokens, block * BLOCK_SIZE) != NONE:
            return
        pool.nodes[block].parent = parent
        pool.nodes[block].edge_hash = hashed
        pool.state[block] = PENDING
        insert_edge(pool, block)
        parent = block
        block = pool.next[block]


@inner
def retract(pool: Pool, block: int) -> None:
    """Takes a block and its sequence's next ones out of the index again, as far as they are PENDING."""
    while block != NONE and pool.state[block] == PENDING:
        remove_edge(pool, block)
        pool.state[block] = PRIVATE
        wake_waiters(pool, block, False)
        block = pool.next[block]


@inner
def seal_first(pool: Pool, row: int) -> int:
    """Moves a sequence's first private block, full and written, into the trie.

    When an equal READY block stands there it wins: the sequence goes on with that one, the duplicate goes
    to the fence, and the answer is the winner; otherwise NONE.
    """
    sequence = pool.sequences[row]
    block = sequence.first
    parent = sequence.node
    start = block * BLOCK_SIZE
    path = extend_path(sequence.path, pool.tokens, start, pool.secret)
    sequence.path = path
    sequence.num_sealed += 1
    if pool.state[block] == PENDING:
        _make_ready(pool, row)
        wake_waiters(pool, block, True)
        return NONE
    hashed = edge_hash(path)
    other = find_block(pool, hashed, parent, pool.tokens, start)
    if other != NONE and pool.state[other] == READY:
        _replace(pool, row, other)
        return other
    if other != NONE:  # another sequence is still computing it
        retract(pool, other)
    pool.nodes[block].parent = parent
    pool.nodes[block].edge_hash = hashed
    insert_edge(pool, block)
    _make_ready(pool, row)
    return NONE


@inner
def _make_ready(pool: Pool, row: int) -> None:
    """The sequence's hold moves from the parent to the block; the parent's refs count the block instead."""
    sequence = pool.sequences[row]
    parent = sequence.node
    block = pop_first(pool, row)
    node = pool.nodes[block]
    node.refs = 1
    node.children = 0
    node.last_used = 0
    node.fence_step = 0
    if parent < pool.nodes.size:
        node.depth = pool.nodes[parent].depth + 1
        pool.nodes[parent].children += 1
    else:
        node.depth = 1
        pool.roots[parent - pool.nodes.size].children += 1
    pool.state[block] = READY
    pool.owner[block] = sequence.tenant
    sequence.node = block
    log_change(pool, block, STORED)
    pool.counters[0].num_private -= 1
    pool.counters[0].num_ready += 1


@inner
def _replace(pool: Pool, row: int, winner: int) -> None:
    sequence = pool.sequences[row]
    hold(pool, winner)
    unhold(pool, sequence.node)
    sequence.node = winner
    duplicate = pop_first(pool, row)
    put_back(pool, duplicate, NEXT_CALL)
    pool.tenants[sequence.tenant].charged -= 1
    pool.counters[0].num_private -= 1
    pool.counters[0].num_replaced_blocks += 1
