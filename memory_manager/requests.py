"""What an engine says in one call, one to one with UpdateSequencesRequest of memory.proto.

A request that could be made is well formed: its columns have the right types and lengths.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from memory_manager.columns import (
    INT32,
    INT64,
    Int32s,
    Int64s,
    freeze,
    no_int32s,
    no_int64s,
    same_length,
)
from memory_manager.errors import InvalidRequestError


@dataclass(frozen=True, slots=True, eq=False)
class Advance:
    """New final tokens of n sequences. `num_drafts` may be empty: none for all."""

    sequence_ids: Int64s = field(default_factory=no_int64s)
    num_tokens: Int32s = field(default_factory=no_int32s)
    tokens: Int32s = field(default_factory=no_int32s)  # [sum(num_tokens)]
    num_written: Int32s = field(default_factory=no_int32s)
    num_drafts: Int32s = field(default_factory=no_int32s)

    def __post_init__(self) -> None:
        freeze(self.sequence_ids, INT64, "advance.sequence_ids")
        freeze(self.num_tokens, INT32, "advance.num_tokens")
        freeze(self.tokens, INT32, "advance.tokens")
        freeze(self.num_written, INT32, "advance.num_written")
        freeze(self.num_drafts, INT32, "advance.num_drafts")
        n = self.sequence_ids.size
        if self.num_tokens.size != n or self.num_written.size != n or self.num_drafts.size not in (0, n):
            raise InvalidRequestError("BAD_ARRAY_LENGTH", "columns of advance differ in length")
        if int(self.num_tokens.sum()) != self.tokens.size:
            raise InvalidRequestError("BAD_ARRAY_LENGTH", "advance.tokens does not fit advance.num_tokens")


@dataclass(frozen=True, slots=True, eq=False)
class Truncate:
    sequence_ids: Int64s = field(default_factory=no_int64s)
    num_blocks_kept: Int32s = field(default_factory=no_int32s)

    def __post_init__(self) -> None:
        freeze(self.sequence_ids, INT64, "truncate.sequence_ids")
        freeze(self.num_blocks_kept, INT32, "truncate.num_blocks_kept")
        same_length(self.sequence_ids.size, num_blocks_kept=self.num_blocks_kept)


@dataclass(frozen=True, slots=True, eq=False)
class Release:
    sequence_ids: Int64s = field(default_factory=no_int64s)

    def __post_init__(self) -> None:
        freeze(self.sequence_ids, INT64, "release.sequence_ids")


@dataclass(frozen=True, slots=True, eq=False)
class Fork:
    parent_ids: Int64s = field(default_factory=no_int64s)
    child_ids: Int64s = field(default_factory=no_int64s)

    def __post_init__(self) -> None:
        freeze(self.parent_ids, INT64, "fork.parent_ids")
        freeze(self.child_ids, INT64, "fork.child_ids")
        same_length(self.parent_ids.size, child_ids=self.child_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    sequence_ids: Int64s = field(default_factory=no_int64s)
    num_tokens_ahead: Int32s = field(default_factory=no_int32s)

    def __post_init__(self) -> None:
        freeze(self.sequence_ids, INT64, "room.sequence_ids")
        freeze(self.num_tokens_ahead, INT32, "room.num_tokens_ahead")
        same_length(self.sequence_ids.size, num_tokens_ahead=self.num_tokens_ahead)


@dataclass(frozen=True, slots=True, eq=False)
class Acquire:
    sequence_id: int
    tokens: Int32s
    tenant: str = ""
    salt: str = ""
    adapter: str = ""
    priority: int = 0
    match_prefix: bool = True

    def __post_init__(self) -> None:
        freeze(self.tokens, INT32, "acquire.tokens")
        if self.tokens.size == 0:
            raise InvalidRequestError("NO_TOKENS", f"acquire of sequence {self.sequence_id} has no tokens")


NO_ADVANCE = Advance()
NO_TRUNCATE = Truncate()
NO_RELEASE = Release()
NO_FORK = Fork()
NO_ROOM = Room()


@dataclass(frozen=True, slots=True, eq=False)
class UpdateRequest:
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


def same_body(left: Any, right: Any) -> bool:
    """Whether two messages are equal, arrays compared by content."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return np.array_equal(left, right)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same_body, left, right))
    if hasattr(left, "__dataclass_fields__"):
        return all(same_body(getattr(left, f.name), getattr(right, f.name)) for f in fields(left))
    return bool(left == right)
