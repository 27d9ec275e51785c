"""What a request produces, as both doors see it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import zip_longest
from typing import NamedTuple

from nexuskv.v1 import engine_pb2


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class TokenLogprob(NamedTuple):
    """A token and its alternatives, best first, from the unmodified distribution."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]
    offset: int = 0  # characters of the choice's text before the token


class Step(NamedTuple):
    """What a step of the engine said besides tokens."""

    seconds: float | None = None  # since the choice's output before
    block_ids: Sequence[int] = ()  # the sequence's block table, when it was asked for
    pool: engine_pb2.PoolState | None = None


class TokenEvent(NamedTuple):
    """One token with the step it came from."""

    text: str
    step: Step


@dataclass(slots=True)
class Delta:
    """What is new for one choice. Text never contains a stop string or a split character."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None  # the stop string or the stop token's id
    events: list[TokenEvent] = field(default_factory=list)  # only when asked for


class DraftSource(StrEnum):
    SHARED_INDEX = "shared_index"
    PROMPT_LOOKUP = "prompt_lookup"
    DRAFT_MODEL = "draft_model"


class DraftUsage(NamedTuple):
    """Entry i of `accepted_per_position`: drafts whose (i + 1)-th token was accepted."""

    num_drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()

    @classmethod
    def of_step(cls, num_drafted: int, num_accepted: int) -> "DraftUsage":
        """One verified draft: what was accepted of it is its beginning."""
        return cls(1, num_drafted, num_accepted, (1,) * num_accepted)

    def plus(self, other: "DraftUsage") -> "DraftUsage":
        positions = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return DraftUsage(
            self.num_drafts + other.num_drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted_tokens + other.accepted_tokens,
            tuple(map(sum, positions)),
        )


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    drafts: dict[DraftSource, DraftUsage] = field(default_factory=dict)
    sequence_ids: list[int] = field(default_factory=list)  # of each prompt

    @property
    def draft_tokens(self) -> int:
        return sum(drafts.draft_tokens for drafts in self.drafts.values())

    @property
    def accepted_tokens(self) -> int:
        return sum(drafts.accepted_tokens for drafts in self.drafts.values())

    def drafted(self, source: DraftSource, drafts: DraftUsage) -> None:
        self.drafts[source] = self.drafts.get(source, DraftUsage()).plus(drafts)

    def add(self, other: "Usage") -> None:
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.cached_tokens += other.cached_tokens
        self.sequence_ids += other.sequence_ids
        for source, drafts in other.drafts.items():
            self.drafted(source, drafts)


@dataclass(slots=True)
class Timings:
    """Seconds since the epoch; None where it did not happen."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
