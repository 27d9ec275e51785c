"""Blocks change hands: the free stack, the fence, a sequence's chain of private blocks."""

# mypy: no-warn-return-any

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
    free_list, state, owner, prev, next = pool.free_list, pool.state, pool.owner, pool.prev, pool.next
    sequence = pool.sequences[row]
    tenant = sequence.tenant
    top = pool.counters[0].num_free
    last = sequence.last
    for i in range(num_blocks):
        block = free_list[top - 1 - i]
        state[block] = PRIVATE
        owner[block] = tenant
        prev[block] = last
        next[block] = NONE
        if last != NONE:
            next[last] = block
        out[start + i] = block
        last = block
    if num_blocks > 0:
        if sequence.first == NONE:
            sequence.first = out[start]
        if sequence.cursor == NONE:
            sequence.cursor = out[start]
        sequence.last = last
    sequence.num_blocks += num_blocks
    pool.counters[0].num_free -= num_blocks
    pool.counters[0].num_private += num_blocks
    pool.tenants[tenant].charged += num_blocks


@inner
def drop_private(pool: Pool, row: int, num_kept: int) -> None:
    """Gives a sequence's private blocks back, from the end, until its table has `num_kept` blocks.

    None of them may be PENDING. A step already launched may touch them.
    """
    prev = pool.prev
    sequence = pool.sequences[row]
    num_dropped = sequence.num_blocks - num_kept
    fence_step = pool.counters[0].launched_step
    block = sequence.last
    for _ in range(num_dropped):
        before = prev[block]
        put_back(pool, block, fence_step)
        block = before
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
