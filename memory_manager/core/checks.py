"""Validation of a whole update before any of it is executed: a rejected call changes nothing."""

# mypy: no-warn-return-any

from enum import IntEnum
from typing import NamedTuple

from memory_manager.core.jit import inner
from memory_manager.core.layout import BLOCK_SIZE, NONE, Array, Pool
from memory_manager.core.rows import find_row
from memory_manager.core.texts import text_start


class Problem(IntEnum):
    """What can be wrong with an entry; the names are the reasons that callers see."""

    NONE = 0
    UNKNOWN_SEQUENCE = 1
    SEQUENCE_EXISTS = 2
    DUPLICATE_SEQUENCE = 3
    BAD_SEQUENCE_ID = 4
    BAD_NUM_TOKENS = 5
    BAD_NUM_WRITTEN = 6
    NO_ROOM = 7
    BAD_TRUNCATE = 8
    TRUNCATE_TOO_SHORT = 9
    BAD_STEPS = 10
    BAD_ARRAY_LENGTH = 11


# Marks of a sequence within one call: named by advance, by truncate, by release, by room.
_ADVANCED, _TRUNCATED, _RELEASED, _ROOM, _NUM_MARKS = 1, 2, 4, 8, 16


class Verdict(NamedTuple):
    """The first bad entry, if any, and how much the answer may have to hold at most."""

    problem: Problem
    sequence_id: int
    most_replaced: int
    most_copies: int
    most_room: int
    most_text: int  # tokens and boundaries


@inner
def check_update(
    pool: Pool,
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
) -> Verdict:
    """Checks the lists as if those before had been executed. Changes only marks."""
    counters = pool.counters
    if (
        completed_step > launched_step
        or launched_step < counters[0].launched_step
        or completed_step < counters[0].completed_step
    ):
        return Verdict(Problem.BAD_STEPS, 0, 0, 0, 0, 0)
    if (
        not advance_ids.size == num_tokens.size == num_written.size
        or (num_drafts.size != 0 and num_drafts.size != advance_ids.size)
        or truncate_ids.size != num_kept.size
        or parent_ids.size != child_ids.size
        or room_ids.size != num_ahead.size
    ):
        return Verdict(Problem.BAD_ARRAY_LENGTH, 0, 0, 0, 0, 0)
    counters[0].calls += 1
    most_copies = most_room = most_text = 0
    problem, sequence_id, most_replaced = _check_advance(
        pool, advance_ids, num_tokens, tokens.size, num_written
    )
    if problem == Problem.NONE:
        problem, sequence_id = _check_truncate(pool, truncate_ids, num_kept)
    if problem == Problem.NONE:
        most_text = _mark_released(pool, release_ids)
        problem, sequence_id, most_copies = _check_fork(pool, parent_ids, child_ids)
    if problem == Problem.NONE:
        problem, sequence_id, most_room = _check_room(pool, room_ids, num_ahead, parent_ids, child_ids)
    if problem == Problem.NONE:
        problem, sequence_id = _check_new(pool, acquire_ids)
    most_room = min(most_room, pool.nodes.size)
    return Verdict(problem, sequence_id, most_replaced, most_copies, most_room, most_text)


@inner
def _mark(pool: Pool, row: int, bit: int) -> bool:
    """Marks a sequence; answers whether it had this mark in this call already."""
    sequence = pool.sequences[row]
    base = pool.counters[0].calls * _NUM_MARKS
    if sequence.mark < base:
        sequence.mark = base
    was_marked = sequence.mark & bit != 0
    sequence.mark |= bit
    return was_marked


@inner
def _has_mark(pool: Pool, row: int, bit: int) -> bool:
    mark = pool.sequences[row].mark
    return mark >= pool.counters[0].calls * _NUM_MARKS and mark & bit != 0


@inner
def _tokens_after_advance(pool: Pool, row: int) -> int:
    sequence = pool.sequences[row]
    return sequence.checked_tokens if _has_mark(pool, row, _ADVANCED) else sequence.num_tokens


@inner
def _check_advance(
    pool: Pool, sequence_ids: Array, num_tokens: Array, num_all_tokens: int, num_written: Array
) -> tuple[Problem, int, int]:
    most_replaced = num_counted = 0
    for i in range(sequence_ids.size):
        row = find_row(pool, sequence_ids[i])
        if row == NONE:
            return Problem.UNKNOWN_SEQUENCE, sequence_ids[i], 0
        if _mark(pool, row, _ADVANCED):
            return Problem.DUPLICATE_SEQUENCE, sequence_ids[i], 0
        sequence = pool.sequences[row]
        if num_tokens[i] < 0:
            return Problem.BAD_NUM_TOKENS, sequence_ids[i], 0
        total = sequence.num_tokens + num_tokens[i]
        if total > sequence.num_blocks * BLOCK_SIZE:
            return Problem.NO_ROOM, sequence_ids[i], 0
        if num_written[i] < sequence.num_written or num_written[i] > total:
            return Problem.BAD_NUM_WRITTEN, sequence_ids[i], 0
        sequence.checked_tokens = total
        most_replaced += num_written[i] // BLOCK_SIZE - sequence.num_sealed
        num_counted += num_tokens[i]
    if num_counted != num_all_tokens:
        return Problem.BAD_ARRAY_LENGTH, 0, 0
    return Problem.NONE, 0, most_replaced


@inner
def _check_truncate(pool: Pool, sequence_ids: Array, num_kept: Array) -> tuple[Problem, int]:
    for i in range(sequence_ids.size):
        row = find_row(pool, sequence_ids[i])
        if row == NONE:
            return Problem.UNKNOWN_SEQUENCE, sequence_ids[i]
        if _mark(pool, row, _TRUNCATED):
            return Problem.DUPLICATE_SEQUENCE, sequence_ids[i]
        if num_kept[i] < 0 or num_kept[i] > pool.sequences[row].num_blocks:
            return Problem.BAD_TRUNCATE, sequence_ids[i]
        if num_kept[i] * BLOCK_SIZE < _tokens_after_advance(pool, row):
            return Problem.TRUNCATE_TOO_SHORT, sequence_ids[i]
        pool.sequences[row].checked_blocks = num_kept[i]
    return Problem.NONE, 0


@inner
def _mark_released(pool: Pool, sequence_ids: Array) -> int:
    """Answers the size of their texts."""
    most_text = 0
    for i in range(sequence_ids.size):
        row = find_row(pool, sequence_ids[i])
        if row != NONE:
            if not _mark(pool, row, _RELEASED) and pool.counters[0].remembers:
                most_text += _tokens_after_advance(pool, row) - text_start(pool, row) + 1
    return most_text


@inner
def _check_fork(pool: Pool, parent_ids: Array, child_ids: Array) -> tuple[Problem, int, int]:
    most_copies = 0
    for i in range(parent_ids.size):
        row = find_row(pool, parent_ids[i])
        if row == NONE or _has_mark(pool, row, _RELEASED):
            return Problem.UNKNOWN_SEQUENCE, parent_ids[i], 0
        num_tokens = _tokens_after_advance(pool, row)
        most_copies += (num_tokens + BLOCK_SIZE - 1) // BLOCK_SIZE
    problem, sequence_id = _check_new(pool, child_ids)
    return problem, sequence_id, most_copies


@inner
def _check_room(
    pool: Pool, sequence_ids: Array, num_ahead: Array, parent_ids: Array, child_ids: Array
) -> tuple[Problem, int, int]:
    most_room = 0
    for i in range(sequence_ids.size):
        row = find_row(pool, sequence_ids[i])
        num_blocks = 0
        if row == NONE or _has_mark(pool, row, _RELEASED):
            row = NONE
            for k in range(child_ids.size):  # a child of this very call
                if child_ids[k] == sequence_ids[i]:
                    row = find_row(pool, parent_ids[k])
            if row == NONE:
                return Problem.UNKNOWN_SEQUENCE, sequence_ids[i], 0
        elif _mark(pool, row, _ROOM):
            return Problem.DUPLICATE_SEQUENCE, sequence_ids[i], 0
        elif _has_mark(pool, row, _TRUNCATED):
            num_blocks = pool.sequences[row].checked_blocks
        else:
            num_blocks = pool.sequences[row].num_blocks
        if num_ahead[i] < 0:
            return Problem.BAD_NUM_TOKENS, sequence_ids[i], 0
        num_slots = _tokens_after_advance(pool, row) + num_ahead[i]
        most_room += max(0, (num_slots + BLOCK_SIZE - 1) // BLOCK_SIZE - num_blocks)
    return Problem.NONE, 0, most_room


@inner
def _check_new(pool: Pool, sequence_ids: Array) -> tuple[Problem, int]:
    """Ids of new sequences. That none is named twice is checked by the caller."""
    for i in range(sequence_ids.size):
        if sequence_ids[i] < 1:
            return Problem.BAD_SEQUENCE_ID, sequence_ids[i]
        row = find_row(pool, sequence_ids[i])
        if row != NONE and not _has_mark(pool, row, _RELEASED):
            return Problem.SEQUENCE_EXISTS, sequence_ids[i]
    return Problem.NONE, 0
