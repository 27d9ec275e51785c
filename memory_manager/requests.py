"""What an engine says in one call, one to one with UpdateSequencesRequest of memory.proto."""

from typing import Any, NamedTuple

import numpy as np

from memory_manager.columns import INT32, INT64, NO_INT32S, NO_INT64S, Int32s, Int64s, freeze
from memory_manager.errors import InvalidRequestError


class Advance(NamedTuple):
    """New final tokens of n sequences."""

    sequence_ids: Int64s = NO_INT64S
    num_tokens: Int32s = NO_INT32S
    tokens: Int32s = NO_INT32S  # [sum(num_tokens)]
    num_written: Int32s = NO_INT32S
    num_drafts: Int32s = NO_INT32S  # may be empty: none for all


class Truncate(NamedTuple):
    sequence_ids: Int64s = NO_INT64S
    num_blocks_kept: Int32s = NO_INT32S


class Release(NamedTuple):
    sequence_ids: Int64s = NO_INT64S


class Fork(NamedTuple):
    parent_ids: Int64s = NO_INT64S
    child_ids: Int64s = NO_INT64S


class Room(NamedTuple):
    sequence_ids: Int64s = NO_INT64S
    num_tokens_ahead: Int32s = NO_INT32S


class Acquire(NamedTuple):
    sequence_id: int
    tokens: Int32s
    tenant: str = ""
    salt: str = ""
    adapter: str = ""
    priority: int = 0
    match_prefix: bool = True


NO_ADVANCE = Advance()
NO_TRUNCATE = Truncate()
NO_RELEASE = Release()
NO_FORK = Fork()
NO_ROOM = Room()


class UpdateRequest(NamedTuple):
    epoch: int
    op_seq: int
    launched_step: int = 0
    completed_step: int = 0
    advance: Advance = NO_ADVANCE
    truncate: Truncate = NO_TRUNCATE
    release: Release = NO_RELEASE
    fork: Fork = NO_FORK
    room: Room = NO_ROOM
    acquires: tuple[Acquire, ...] = ()


def freeze_columns(request: UpdateRequest) -> None:
    """Checks every array's type and length. Raises InvalidRequestError (BAD_ARRAY, BAD_ARRAY_LENGTH)."""
    advance = request.advance
    freeze(advance.sequence_ids, INT64, "advance.sequence_ids")
    freeze(advance.num_tokens, INT32, "advance.num_tokens")
    freeze(advance.tokens, INT32, "advance.tokens")
    freeze(advance.num_written, INT32, "advance.num_written")
    freeze(advance.num_drafts, INT32, "advance.num_drafts")
    num_advances = advance.sequence_ids.size
    if not advance.num_tokens.size == advance.num_written.size == num_advances:
        raise _differ("advance")
    if advance.num_drafts.size not in (0, num_advances):
        raise _differ("advance")
    if request.truncate is not NO_TRUNCATE:
        _freeze_pair("truncate", *request.truncate, INT32)
    if request.release is not NO_RELEASE:
        freeze(request.release.sequence_ids, INT64, "release.sequence_ids")
    if request.fork is not NO_FORK:
        _freeze_pair("fork", *request.fork, INT64)
    if request.room is not NO_ROOM:
        _freeze_pair("room", *request.room, INT32)
    for acquire in request.acquires:
        freeze(acquire.tokens, INT32, "acquire.tokens")
        if acquire.tokens.size == 0:
            raise InvalidRequestError("NO_TOKENS", f"acquire of sequence {acquire.sequence_id} has no tokens")


def _freeze_pair(name: str, left: Int64s, right: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> None:
    freeze(left, INT64, name)
    freeze(right, dtype, name)
    if left.size != right.size:
        raise _differ(name)


def _differ(name: str) -> InvalidRequestError:
    return InvalidRequestError("BAD_ARRAY_LENGTH", f"the columns of {name} differ in length")
