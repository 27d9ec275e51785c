"""The seam between the engine and the memory manager.

One update is outstanding at a time; its lists are executed in the order of the fields below. What each
list does and when it is refused stands in protos/nexuskv/v1/memory.proto.
"""

import enum
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol


class Advance(NamedTuple):
    sequence_id: int
    tokens: list[int]  # new final tokens
    num_written: int  # final tokens whose K/V is in the pool
    num_drafts: int = 0


class Truncate(NamedTuple):
    sequence_id: int
    num_blocks_kept: int


class Fork(NamedTuple):
    parent_id: int
    child_id: int


class Room(NamedTuple):
    sequence_id: int
    num_tokens_ahead: int  # of the final tokens


class Acquire(NamedTuple):
    sequence_id: int
    tenant: str
    salt: str
    adapter: str
    priority: int
    tokens: list[int]
    match_prefix: bool


@dataclass
class Update:
    """What an engine has to say since its last call."""

    launched_step: int = 0
    completed_step: int = 0
    advances: list[Advance] = field(default_factory=list)
    truncates: list[Truncate] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    rooms: list[Room] = field(default_factory=list)
    acquires: list[Acquire] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        lists = (self.advances, self.truncates, self.releases, self.forks, self.rooms, self.acquires)
        return not any(lists)


class Replacement(NamedTuple):
    sequence_id: int
    logical_index: int
    block: int


class DraftOffer(NamedTuple):
    sequence_id: int
    base_length: int  # tokens of the sequence that the draft continues
    tokens: list[int]


class ForkResult(NamedTuple):
    granted: bool
    copies: list[tuple[int, int]]  # (src, dst), in logical order


class AcquireStatus(enum.Enum):
    GRANTED = "granted"
    WAIT = "wait"
    SHORT = "short"
    NEVER = "never"


class AcquireResult(NamedTuple):
    status: AcquireStatus
    block_table: list[int]
    num_cached: int
    num_needed: int
    num_limit: int


@dataclass(frozen=True)
class UpdateAnswer:
    """Per list of the update, in its order."""

    replacements: list[Replacement]
    drafts: list[DraftOffer]
    forks: list[ForkResult]
    rooms: list[list[int]]  # blocks appended to each table
    acquires: list[AcquireResult]
    wake: list[int]
    num_free: int
    num_fenced: int
    num_evictable: int


class MemoryClient(Protocol):
    """Talks to the memory manager for one engine; used from the engine's thread only."""

    def register(self, num_blocks: int, model_fingerprint: str, timeout_s: float) -> bool:
        """Opens an epoch; all blocks are free afterwards. False when nobody answered in time."""
        ...

    @property
    def epoch_ended(self) -> bool:
        """Whether the memory manager is known to have ended the epoch (a heartbeat was refused)."""
        ...

    def send(self, update: Update) -> None:
        """Starts a call; the one before must have been answered."""
        ...

    def receive(self, timeout_s: float) -> UpdateAnswer | None:
        """The outstanding call's answer, or None when it has not come within the time.

        An unreachable memory manager is no answer: the call is repeated until it is there again. Raises
        StaleEpochError when the epoch has ended, MemoryManagerError when the call was refused.
        """
        ...
