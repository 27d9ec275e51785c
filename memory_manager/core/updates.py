"""The lists of an update that concern living sequences, one entry point each. Arguments are checked."""

from typing import NamedTuple

from memory_manager.core.blocks import append_blocks, drop_private, settle_fences
from memory_manager.core.checks import Problem, check_update
from memory_manager.core.eviction import reserve
from memory_manager.core.handle import open_pool
from memory_manager.core.holds import drop_hold, hold
from memory_manager.core.jit import inner, kernel
from memory_manager.core.layout import BLOCK_SIZE, NONE, Array, Pool
from memory_manager.core.rows import find_row, give_row, take_row
from memory_manager.core.trie import retract, seal_first
from memory_manager.core.waiting import remove_waiter


class Begun(NamedTuple):
    """What `begin` answers (as a plain tuple, which reaches Python faster)."""

    problem: int  # of the first bad entry
    sequence_id: int  # of the first bad entry
    num_replaced: int
    # How much the answer may have to hold at most.
    most_replaced: int
    most_copies: int
    most_room: int


@kernel
def begin(
    arrays: Array,
    launched_step: int,
    completed_step: int,
    advance_ids: Array,  # int64[a]
    num_tokens: Array,  # int32[a]
    tokens: Array,  # int32[sum(num_tokens)]
    num_written: Array,  # int32[a]
    num_drafts: Array,  # int32[a] or int32[0]
    truncate_ids: Array,  # int64[t]
    num_kept: Array,  # int32[t]
    release_ids: Array,  # int64[r]
    parent_ids: Array,  # int64[f]
    child_ids: Array,  # int64[f]
    room_ids: Array,  # int64[m]
    num_ahead: Array,  # int32[m]
    acquire_ids: Array,  # int64[q]
    replaced_ids: Array,  # out, int64[enough]
    replaced_indices: Array,  # out, int32[enough], logical block
    replaced_blocks: Array,  # out, int32[enough]
) -> tuple[int, int, int, int, int, int]:
    """Checks a whole call; begins it if all is well: settles fences, advances.

    Does nothing when an entry is bad or the columns for replacements may be too short.
    """
    pool: Pool = open_pool(arrays)
    verdict = check_update(
        pool,
        launched_step,
        completed_step,
        advance_ids,
        num_tokens,
        tokens,
        num_written,
        num_drafts,
        truncate_ids,
        num_kept,
        release_ids,
        parent_ids,
        child_ids,
        room_ids,
        num_ahead,
        acquire_ids,
    )
    num_replaced = 0
    if verdict.problem == Problem.NONE and verdict.most_replaced <= replaced_blocks.size:
        pool.counters[0].launched_step = launched_step
        pool.counters[0].completed_step = completed_step
        if pool.counters[0].num_fenced > 0:
            settle_fences(pool)
        replaced = (replaced_ids, replaced_indices, replaced_blocks)
        num_replaced = _advance(pool, advance_ids, num_tokens, tokens, num_written, replaced)
    return (
        verdict.problem.value,
        verdict.sequence_id,
        num_replaced,
        verdict.most_replaced,
        verdict.most_copies,
        verdict.most_room,
    )


@inner
def _advance(
    pool: Pool,
    sequence_ids: Array,
    num_tokens: Array,
    tokens: Array,
    num_written: Array,
    replaced: tuple[Array, Array, Array],
) -> int:
    """Appends tokens and seals. Answers the number of `replaced` entries."""
    replaced_ids, replaced_indices, replaced_blocks = replaced
    start = num_replaced = 0
    for i in range(sequence_ids.size):
        row = find_row(pool, sequence_ids[i])
        sequence = pool.sequences[row]
        _append_tokens(pool, row, tokens, start, num_tokens[i])
        start += num_tokens[i]
        sequence.num_written = num_written[i]
        while sequence.seals and (sequence.num_sealed + 1) * BLOCK_SIZE <= sequence.num_written:
            winner = seal_first(pool, row)
            if winner != NONE:
                replaced_ids[num_replaced] = sequence_ids[i]
                replaced_indices[num_replaced] = sequence.num_sealed - 1
                replaced_blocks[num_replaced] = winner
                num_replaced += 1
    return num_replaced


@inner
def _append_tokens(pool: Pool, row: int, tokens: Array, start: int, num_tokens: int) -> None:
    sequence = pool.sequences[row]
    block, offset = sequence.cursor, sequence.num_tokens % BLOCK_SIZE
    for i in range(start, start + num_tokens):
        pool.tokens[block * BLOCK_SIZE + offset] = tokens[i]
        offset += 1
        if offset == BLOCK_SIZE:
            block, offset = pool.next[block], 0
    sequence.cursor = block
    sequence.num_tokens += num_tokens


@kernel
def truncate(arrays: Array, sequence_ids: Array, num_kept: Array) -> None:
    """Gives reserve back: each sequence keeps the first `num_kept` (int32[n]) blocks."""
    pool: Pool = open_pool(arrays)
    for i in range(sequence_ids.size):
        row = find_row(pool, sequence_ids[i])
        pool.counters[0].num_truncated_blocks += pool.sequences[row].num_blocks - num_kept[i]
        drop_private(pool, row, num_kept[i])


@kernel
def release(arrays: Array, sequence_ids: Array) -> None:
    """Ends sequences; unknown ids are ignored."""
    pool: Pool = open_pool(arrays)
    for i in range(sequence_ids.size):
        row = find_row(pool, sequence_ids[i])
        if row != NONE:
            sequence = pool.sequences[row]
            retract(pool, sequence.first)
            drop_private(pool, row, sequence.num_sealed)
            drop_hold(pool, sequence.node)
            give_row(pool, row)
        elif pool.counters[0].num_waiting > 0:
            remove_waiter(pool, sequence_ids[i])


@kernel
def fork(
    arrays: Array,
    parent_ids: Array,  # int64[n]
    child_ids: Array,  # int64[n]
    granted: Array,  # out, int32[n]
    num_copies: Array,  # out, int32[n]
    copy_src: Array,  # out, int32[enough]
    copy_dst: Array,  # out, int32[enough]
) -> int:
    """Children that continue their parents' final tokens. Answers the number of copies in all."""
    pool: Pool = open_pool(arrays)
    num_all = 0
    for i in range(parent_ids.size):
        row = find_row(pool, parent_ids[i])
        parent = pool.sequences[row]
        num_blocks = (parent.num_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE
        num_fresh = num_blocks - parent.num_sealed
        granted[i] = reserve(pool, parent.tenant, num_fresh, False) == num_fresh
        num_copies[i] = num_fresh if granted[i] else 0
        if granted[i]:
            _fork_row(pool, row, child_ids[i], num_fresh, copy_src, copy_dst, num_all)
            pool.counters[0].num_forks += 1
            num_all += num_fresh
    return num_all


@inner
def _fork_row(
    pool: Pool, row: int, child_id: int, num_fresh: int, copy_src: Array, copy_dst: Array, start: int
) -> None:
    parent = pool.sequences[row]
    child_row = take_row(pool, child_id, parent.tenant, parent.root)
    child = pool.sequences[child_row]
    child.path = parent.path
    child.num_tokens = parent.num_tokens
    child.num_written = parent.num_written
    child.num_sealed = child.num_blocks = parent.num_sealed
    child.node = parent.node
    child.seals = parent.seals
    hold(pool, child.node)
    append_blocks(pool, child_row, num_fresh, copy_dst, start)
    source = parent.first
    for i in range(start, start + num_fresh):
        copy_src[i] = source
        target = copy_dst[i]
        for k in range(BLOCK_SIZE):
            pool.tokens[target * BLOCK_SIZE + k] = pool.tokens[source * BLOCK_SIZE + k]
        source = pool.next[source]
    child.cursor = child.last if child.num_tokens % BLOCK_SIZE != 0 else NONE


@kernel
def room(
    arrays: Array,
    sequence_ids: Array,  # int64[n]
    num_ahead: Array,  # int32[n]
    num_blocks: Array,  # out, int32[n]
    blocks: Array,  # out, int32[enough]
) -> int:
    """Blocks for the slots after the final tokens, as many as can be had. Answers their number in all.

    A sequence that does not exist is the child of a fork that was refused: it gets none.
    """
    pool: Pool = open_pool(arrays)
    num_all = 0
    for i in range(sequence_ids.size):
        row = find_row(pool, sequence_ids[i])
        num_blocks[i] = 0
        if row != NONE:
            sequence = pool.sequences[row]
            num_slots = sequence.num_tokens + num_ahead[i]
            missing = (num_slots + BLOCK_SIZE - 1) // BLOCK_SIZE - sequence.num_blocks
            if missing > 0:
                num_granted = reserve(pool, sequence.tenant, missing, True)
                append_blocks(pool, row, num_granted, blocks, num_all)
                num_blocks[i] = num_granted
                num_all += num_granted
    return num_all
