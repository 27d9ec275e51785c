"""Blocks change hands: the free stack, the fence, a sequence's chain of private blocks."""

# mypy: no-warn-return-any

import numpy as np

from memory_manager.core.indices import index
from memory_manager.core.jit import inner
from memory_manager.core.layout import (
    BLOCK_SIZE,
    FENCED,
    FREE,
    NEXT_CALL,
    NONE,
    PRIVATE,
    Array,
    Pool,
)


@inner
def put_back(pool: Pool, block: int, fence_step: int) -> None:
    """A block nobody owns any more: free, or fenced until `fence_step` has completed."""
    counters = pool.counters
    if fence_step <= counters[0].completed_step:
        pool.state[block] = FREE
        pool.free_list[counters[0].num_free] = block
        counters[0].num_free += 1
    else:
        pool.state[block] = FENCED
        pool.nodes[block].fence_step = fence_step
        pool.fence[counters[0].num_fenced] = block
        counters[0].num_fenced += 1


@inner
def settle_fences(pool: Pool) -> None:
    """Frees what the completed steps no longer touch, in the order in which it was fenced."""
    counters = pool.counters
    num_kept = 0
    for i in range(counters[0].num_fenced):
        block = pool.fence[i]
        if pool.nodes[block].fence_step == NEXT_CALL:
            pool.nodes[block].fence_step = counters[0].launched_step
        if pool.nodes[block].fence_step <= counters[0].completed_step:
            pool.state[block] = FREE
            pool.free_list[counters[0].num_free] = block
            counters[0].num_free += 1
        else:
            pool.fence[num_kept] = block
            num_kept += 1
    counters[0].num_fenced = num_kept


@inner
def append_blocks(pool: Pool, row: int, num_blocks: int, out: Array, start: int) -> None:
    """Moves free blocks (which the caller has reserved) to the end of a page table.

    Their ids are written to `out[start:]`.
    """
    if num_blocks == 0:
        return
    sequence = pool.sequences[row]
    free_list, top = pool.free_list, pool.counters[0].num_free - 1
    for i in range(num_blocks):
        out[index(start + i)] = free_list[index(top - i)]
    first, last = out[start], _chain(pool, out, start, start + num_blocks, sequence.last)
    if sequence.first == NONE:
        sequence.first = first
    if sequence.cursor == NONE:
        sequence.cursor = first
    sequence.last = last
    sequence.num_blocks += num_blocks
    pool.counters[0].num_free -= num_blocks
    pool.counters[0].num_private += num_blocks
    pool.tenants[sequence.tenant].charged += num_blocks


@inner
def _chain(pool: Pool, blocks: Array, start: int, end: int, last: int) -> int:
    """Puts `blocks[start:end]` into a chain behind `last` (or NONE); answers the chain's new last block.

    Neighbours in the pool are linked a run at a time, as vectors.
    """
    state, prev, next = pool.state, pool.prev, pool.next
    while start < end:
        first = np.int64(blocks[index(start)])
        run = 1
        while start + run < end and blocks[index(start + run)] == first + run:
            run += 1
        for block in range(first, first + run):
            state[index(block)] = PRIVATE
            prev[index(block)] = block - 1
            next[index(block)] = block + 1
        prev[first] = last
        if last != NONE:
            next[last] = first
        last = blocks[index(start + run - 1)]
        start += run
    next[last] = NONE
    return last


@inner
def drop_private(pool: Pool, row: int, num_kept: int) -> None:
    """Gives a sequence's private blocks back, from the end, until its table has `num_kept` blocks.

    None of them may be PENDING. A step already launched may touch them.
    """
    sequence = pool.sequences[row]
    num_dropped = sequence.num_blocks - num_kept
    if num_dropped == 0:
        return
    if pool.counters[0].launched_step <= pool.counters[0].completed_step:
        block = _free_from(pool, sequence.last, num_dropped)
    else:
        block = _fence_from(pool, sequence.last, num_dropped)
    sequence.last = block
    if block == NONE:
        sequence.first = NONE
    else:
        pool.next[block] = NONE
    if sequence.num_tokens >= num_kept * BLOCK_SIZE:
        sequence.cursor = NONE
    sequence.num_blocks = num_kept
    pool.counters[0].num_private -= num_dropped
    pool.tenants[sequence.tenant].charged -= num_dropped


@inner
def _free_from(pool: Pool, block: int, num_blocks: int) -> int:
    """Frees a chain from its end; answers the block before those.

    Neighbours in the pool are freed a run at a time: a chain that is followed link by link waits for each.
    """
    state, prev, free_list = pool.state, pool.prev, pool.free_list
    top = pool.counters[0].num_free
    end = top + num_blocks
    while top < end:
        run = 1
        # (Said like this, the next link's place does not come from the one before: no load waits.)
        while top + run < end and prev[index(block - run + 1)] + run == block:
            run += 1
        for i in range(run):
            state[index(block - i)] = FREE
            free_list[index(top + i)] = block - i
        top += run
        block = prev[index(block - run + 1)]
    pool.counters[0].num_free = end
    return block


@inner
def _fence_from(pool: Pool, block: int, num_blocks: int) -> int:
    """Fences a chain from its end; answers the block before those."""
    for _ in range(num_blocks):
        put_back(pool, block, pool.counters[0].launched_step)
        block = pool.prev[block]
    return block


@inner
def pop_first(pool: Pool, row: int) -> int:
    """Takes a sequence's first private block out of its chain."""
    sequence = pool.sequences[row]
    block = sequence.first
    after = pool.next[block]
    sequence.first = after
    if after == NONE:
        sequence.last = NONE
    else:
        pool.prev[after] = NONE
    pool.prev[block] = NONE
    pool.next[block] = NONE
    return block
