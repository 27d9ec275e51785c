"""What an engine says in one call, one to one with UpdateSequencesRequest of memory.proto."""

from typing import NamedTuple

from memory_manager.columns import INT32, NO_INT32S, NO_INT64S, WRITEABLE_FLAG, Int32s, Int64s, freeze
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


def columns_of(request: UpdateRequest) -> tuple[Int64s | Int32s, ...]:
    """The columns of all lists but the acquires, in order; read-only from now on."""
    columns = (
        *request.advance,
        *request.truncate,
        *request.release,
        *request.fork,
        *request.room,
    )
    for column in columns:
        if column.flags.num & WRITEABLE_FLAG:
            column.setflags(write=False)
    return columns


def check_acquires(acquires: tuple[Acquire, ...]) -> None:
    """Raises InvalidRequestError (BAD_ARRAY, NO_TOKENS)."""
    for acquire in acquires:
        freeze(acquire.tokens, INT32, "acquire.tokens")
        if acquire.tokens.size == 0:
            raise InvalidRequestError("NO_TOKENS", f"acquire of sequence {acquire.sequence_id} has no tokens")
