"""What a request produces, as both doors see it."""

from dataclasses import dataclass, field
from enum import StrEnum
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

    at: float  # seconds since the epoch
    block_ids: list[int]  # the sequence's block table, when it was asked for
    pool: engine_pb2.PoolState | None


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
    num_drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    drafts: dict[DraftSource, DraftUsage] = field(default_factory=dict)

    @property
    def draft_tokens(self) -> int:
        return sum(drafts.draft_tokens for drafts in self.drafts.values())

    @property
    def accepted_tokens(self) -> int:
        return sum(drafts.accepted_tokens for drafts in self.drafts.values())

    def drafted(self, source: DraftSource, drafts: DraftUsage) -> None:
        known = self.drafts.get(source, DraftUsage())
        self.drafts[source] = DraftUsage(*map(sum, zip(known, drafts, strict=True)))

    def add(self, other: "Usage") -> None:
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.cached_tokens += other.cached_tokens
        for source, drafts in other.drafts.items():
            self.drafted(source, drafts)


@dataclass(slots=True)
class Timings:
    """Seconds since the epoch; None where it did not happen."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
