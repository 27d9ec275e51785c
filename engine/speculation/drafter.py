"""The seam between whoever guesses tokens and the scheduler that has them verified."""

from enum import Enum
from typing import NamedTuple, Protocol

from engine.sequence import Sequence


class DraftSource(Enum):
    SHARED_INDEX = "shared_index"
    PROMPT_LOOKUP = "prompt_lookup"


class Draft(NamedTuple):
    """Tokens guessed to follow a sequence's tokens, the likeliest continuation first to last."""

    tokens: list[int]
    source: DraftSource


class Drafter(Protocol):
    def propose(self, sequence: Sequence, max_tokens: int) -> Draft | None:
        """At most `max_tokens` (>= 1) tokens that may follow; None when it has no idea."""
        ...
