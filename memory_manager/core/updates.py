"""An update's lists, up to the acquires: one call into compiled code."""

from typing import NamedTuple

from memory_manager.core.blocks import append_blocks, drop_private, settle_fences
from memory_manager.core.checks import Problem, check_update
from memory_manager.core.eviction import reserve
from memory_manager.core.handle import open_pool
from memory_manager.core.holds import drop_hold, hold
from memory_manager.core.jit import inner, kernel
from memory_manager.core.layout import BLOCK_SIZE, NONE, Array, Pool
from memory_manager.core.rows import find_row, give_row, take_row
from memory_manager.core.texts import write_text
from memory_manager.core.trie import retract, seal_first
from memory_manager.core.waiting import remove_waiter


class Executed(NamedTuple):
    """What `execute` answers (as a plain tuple, which reaches Python faster).

    `out` holds, one after the other: indices and blocks of replacements, each with room for
    `most_replaced`; from `fork_at` on granted and num_copies of each fork, then sources and destinations of
    copies, each with room for `most_copies`; from `room_at` on num_blocks of each entry, then the blocks;
    from `text_at` on the root and the text's size of each release (0: it leaves none), then the texts.
    """

    problem: int  # of the first bad entry
    sequence_id: int  # of the first bad entry
    most_replaced: int
    num_replaced: int
    fork_at: int
    most_copies: int
    num_copies: int
    room_at: int
    num_room: int  # blocks
    text_at: int
    out_size: int  # that may be needed


@kernel
def execute(
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
    out: Array,  # out, int32[enough]
) -> tuple[int, int, int, int, int, int, int, int, int, int, int]:
    """Checks a whole call and executes all of its lists but the acquires.

    Does nothing when an entry is bad, or when `replaced_ids` or `out` may be too small. There must be rows
    for the children.
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
    fork_at = 2 * verdict.most_replaced
    room_at = fork_at + 2 * (parent_ids.size + verdict.most_copies)
    text_at = room_at + room_ids.size + verdict.most_room
    out_size = text_at + 2 * release_ids.size + verdict.most_text
    num_replaced = num_copies = num_room = 0
    is_right = verdict.problem == Problem.NONE
    if is_right and verdict.most_replaced <= replaced_ids.size and out_size <= out.size:
        pool.counters[0].launched_step = launched_step
        pool.counters[0].completed_step = completed_step
        if pool.counters[0].num_fenced > 0:
            settle_fences(pool)
        replaced = (replaced_ids, out[: verdict.most_replaced], out[verdict.most_replaced : fork_at])
        num_replaced = _advance(pool, advance_ids, num_tokens, tokens, num_written, replaced)
        _truncate(pool, truncate_ids, num_kept)
        _release(pool, release_ids, out[text_at:out_size])
        num_copies = _fork(pool, parent_ids, child_ids, out[fork_at:room_at], verdict.most_copies)
        num_room = _room(pool, room_ids, num_ahead, out[room_at:text_at])
    return (
        verdict.problem.value,
        verdict.sequence_id,
        verdict.most_replaced,
        num_replaced,
        fork_at,
        verdict.most_copies,
        num_copies,
        room_at,
        num_room,
        text_at,
        out_size,
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
    """Appends tokens and seals. Answers the number of `replaced` (sequence ids, indices, blocks)."""
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


@inner
def _truncate(pool: Pool, sequence_ids: Array, num_kept: Array) -> None:
    """Gives reserve back: each sequence keeps the first `num_kept` (int32[n]) blocks."""
    for i in range(sequence_ids.size):
        row = find_row(pool, sequence_ids[i])
        pool.counters[0].num_truncated_blocks += pool.sequences[row].num_blocks - num_kept[i]
        drop_private(pool, row, num_kept[i])


@inner
def _release(pool: Pool, sequence_ids: Array, out: Array) -> None:
    """Ends sequences; unknown ids are ignored. What rests on a cleared namespace leaves no text."""
    num_releases = sequence_ids.size
    num_written = 2 * num_releases
    for i in range(num_releases):
        row = find_row(pool, sequence_ids[i])
        out[num_releases + i] = 0
        if row != NONE:
            sequence = pool.sequences[row]
            if pool.counters[0].remembers and sequence.seals:
                out[i] = sequence.root
                out[num_releases + i] = write_text(pool, row, out[num_written:])
                num_written += out[num_releases + i]
            retract(pool, sequence.first)
            drop_private(pool, row, sequence.num_sealed)
            drop_hold(pool, sequence.node)
            give_row(pool, row)
        elif pool.counters[0].num_waiting > 0:
            remove_waiter(pool, sequence_ids[i])


@inner
def _fork(pool: Pool, parent_ids: Array, child_ids: Array, out: Array, most_copies: int) -> int:
    """Children that continue their parents' final tokens. Answers the number of copies in all."""
    num_forks = parent_ids.size
    granted, num_copies = out[:num_forks], out[num_forks : 2 * num_forks]
    copy_src = out[2 * num_forks : 2 * num_forks + most_copies]
    copy_dst = out[2 * num_forks + most_copies :]
    num_all = 0
    for i in range(num_forks):
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
    child.num_inherited = parent.num_tokens
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


@inner
def _room(pool: Pool, sequence_ids: Array, num_ahead: Array, out: Array) -> int:
    """Blocks for the slots after the final tokens, as many as can be had. Answers their number in all.

    A sequence that does not exist is the child of a fork that was refused: it gets none.
    """
    num_all = 0
    for i in range(sequence_ids.size):
        row = find_row(pool, sequence_ids[i])
        out[i] = 0
        if row != NONE:
            sequence = pool.sequences[row]
            num_slots = sequence.num_tokens + num_ahead[i]
            missing = (num_slots + BLOCK_SIZE - 1) // BLOCK_SIZE - sequence.num_blocks
            if missing > 0:
                out[i] = reserve(pool, sequence.tenant, missing, True)
                append_blocks(pool, row, out[i], out, sequence_ids.size + num_all)
                num_all += out[i]
    return num_all
