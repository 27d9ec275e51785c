"""Texts: a sequence's tokens as they go into its namespace's draft index, and drafts for those that ask."""

# mypy: no-warn-return-any

import numpy as np

from memory_manager.core.drafts import BOUNDARY, MAX_MATCH, DraftRing, draft
from memory_manager.core.handle import open_pool
from memory_manager.core.jit import inner, kernel
from memory_manager.core.layout import BLOCK_SIZE, NONE, PENDING, PRIVATE, Array, Pool
from memory_manager.core.rows import find_row


@inner
def text_start(pool: Pool, row: int) -> int:
    """Where a sequence's own text begins: what it shares stands in another's, but for the context."""
    return max(0, pool.sequences[row].num_inherited - MAX_MATCH)


@inner
def write_text(pool: Pool, row: int, out: Array) -> int:
    """Writes a sequence's own text and the BOUNDARY behind it; answers their size."""
    start = text_start(pool, row)
    size = pool.sequences[row].num_tokens - start
    _copy_tokens(pool, row, start, out)
    out[size] = BOUNDARY
    return size + 1


@inner
def _copy_tokens(pool: Pool, row: int, start: int, out: Array) -> None:
    """Writes a sequence's tokens from `start` on, going backwards through its page table."""
    end = pool.sequences[row].num_tokens
    block = _last_block(pool, row)
    while end > start:
        first = (end - 1) // BLOCK_SIZE * BLOCK_SIZE
        for i in range(max(first, start), end):
            out[i - start] = pool.tokens[block * BLOCK_SIZE + i - first]
        end = first
        block = _block_before(pool, row, block)


@inner
def _last_block(pool: Pool, row: int) -> int:
    """The block of the sequence's last token."""
    sequence = pool.sequences[row]
    if sequence.num_tokens == sequence.num_sealed * BLOCK_SIZE:
        return sequence.node
    if sequence.num_tokens % BLOCK_SIZE != 0:
        return sequence.cursor
    return sequence.last if sequence.cursor == NONE else pool.prev[sequence.cursor]


@inner
def _block_before(pool: Pool, row: int, block: int) -> int:
    """The block before one of the sequence's; the root of its namespace before the first."""
    if block == pool.sequences[row].first:
        return pool.sequences[row].node
    is_private = pool.state[block] == PRIVATE or pool.state[block] == PENDING
    return pool.prev[block] if is_private else pool.nodes[block].parent


@kernel
def roots_that_ask(arrays: Array, sequence_ids: Array, num_wanted: Array, roots: Array) -> int:
    """Writes the roots of the sequences that want drafts, each once; answers their number."""
    pool: Pool = open_pool(arrays)
    num_roots = 0
    for i in range(sequence_ids.size):
        row = find_row(pool, sequence_ids[i])
        if num_wanted[i] > 0 and row != NONE:
            root = pool.sequences[row].root
            k = 0
            while k < num_roots and roots[k] != root:
                k += 1
            roots[k] = root
            num_roots = max(num_roots, k + 1)
    return num_roots


@kernel
def propose(
    arrays: Array,
    ring: DraftRing,
    root: int,
    sequence_ids: Array,  # int64[n]
    num_wanted: Array,  # int32[n]
    draft_ids: Array,  # out, int64[n]
    lengths: Array,  # out, int32[2, n]: base length and number of tokens of each draft
    tokens: Array,  # out, int32[MAX_MATCH n]
    num_drafts: int,  # written before
    num_tokens: int,
) -> tuple[int, int]:
    """Drafts for the sequences below one root that want them; how many drafts and tokens there are now."""
    pool: Pool = open_pool(arrays)
    suffix = np.empty(MAX_MATCH, np.int32)
    for i in range(sequence_ids.size):
        row = find_row(pool, sequence_ids[i])
        if num_wanted[i] > 0 and row != NONE and pool.sequences[row].root == root:
            length = pool.sequences[row].num_tokens
            start = max(0, length - MAX_MATCH)
            _copy_tokens(pool, row, start, suffix)
            size = draft(ring, suffix[: length - start], num_wanted[i], tokens[num_tokens:])
            if size > 0:
                draft_ids[num_drafts] = sequence_ids[i]
                lengths[0, num_drafts] = length
                lengths[1, num_drafts] = size
                num_drafts += 1
                num_tokens += size
    return num_drafts, num_tokens
