"""What a call is answered, one to one with UpdateSequencesResponse of memory.proto."""

from enum import IntEnum
from typing import NamedTuple

from memory_manager.columns import NO_INT32S, NO_INT64S, Int32s, Int64s


class AdvanceResult(NamedTuple):
    replaced_sequence_ids: Int64s = NO_INT64S
    replaced_indices: Int32s = NO_INT32S  # logical block
    replaced_blocks: Int32s = NO_INT32S
    draft_sequence_ids: Int64s = NO_INT64S
    draft_base_lengths: Int32s = NO_INT32S
    num_draft_tokens: Int32s = NO_INT32S
    draft_tokens: Int32s = NO_INT32S  # [sum(num_draft_tokens)]


class ForkResult(NamedTuple):
    granted: Int32s = NO_INT32S  # 1 GRANTED, 0 SHORT
    num_copies: Int32s = NO_INT32S
    copy_src: Int32s = NO_INT32S  # [sum(num_copies)]
    copy_dst: Int32s = NO_INT32S


class RoomResult(NamedTuple):
    num_blocks: Int32s = NO_INT32S
    blocks: Int32s = NO_INT32S  # [sum(num_blocks)]


class AcquireStatus(IntEnum):
    """Numbers as in the proto."""

    GRANTED = 1
    WAIT = 2
    SHORT = 3
    NEVER = 4


class AcquireResult(NamedTuple):
    status: AcquireStatus
    block_table: Int32s = NO_INT32S
    num_cached: int = 0  # tokens
    num_needed: int = 0  # blocks; SHORT and NEVER
    num_limit: int = 0  # blocks; NEVER


NO_ADVANCE_RESULT = AdvanceResult()
NO_FORK_RESULT = ForkResult()
NO_ROOM_RESULT = RoomResult()


class UpdateAnswer(NamedTuple):
    advance: AdvanceResult
    fork: ForkResult
    room: RoomResult
    acquires: tuple[AcquireResult, ...]  # one per request entry, same order
    wake: Int64s
    num_free: int
    num_fenced: int
    num_evictable: int
