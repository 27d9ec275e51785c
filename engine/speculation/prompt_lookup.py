"""Drafts from the sequence itself: what followed the last time its latest tokens occurred.

Source: prompt lookup decoding (Saxena 2023), with the match extended backwards.
"""

from weakref import WeakKeyDictionary

from engine.sequence import Sequence
from engine.speculation.drafter import Draft, DraftSource

MIN_MATCH = 3
MAX_MATCH = 32
# Older occurrences that are compared; the longest match wins, the latest of equals.
MAX_CANDIDATES = 4


class _Index:
    """Where each run of MIN_MATCH tokens ends."""

    def __init__(self) -> None:
        self.ends: dict[tuple[int, ...], list[int]] = {}
        self.num_indexed = 0

    def catch_up(self, tokens: list[int]) -> None:
        """Indexes new tokens; the latest run is left out until something follows it."""
        for end in range(max(self.num_indexed, MIN_MATCH), len(tokens)):
            self.ends.setdefault(tuple(tokens[end - MIN_MATCH : end]), []).append(end)
        self.num_indexed = max(self.num_indexed, len(tokens))


class PromptLookup:
    """A `Drafter`; proposes at most as many tokens as were matched."""

    def __init__(self) -> None:
        self._indexes: WeakKeyDictionary[Sequence, _Index] = WeakKeyDictionary()

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft | None:
        tokens = sequence.tokens
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = _Index()
        index.catch_up(tokens)
        ends = index.ends.get(tuple(tokens[-MIN_MATCH:]), [])
        best_length, best_end = 0, 0
        for end in reversed(ends[-MAX_CANDIDATES:]):
            length = _match_length(tokens, end)
            if length > best_length:
                best_length, best_end = length, end
        if best_length == 0:
            return None
        count = min(max_tokens, best_length)
        return Draft(tokens[best_end : best_end + count], DraftSource.PROMPT_LOOKUP)


def _match_length(tokens: list[int], end: int) -> int:
    """How many tokens before `end` equal the last ones."""
    length = MIN_MATCH
    while length < min(MAX_MATCH, end) and tokens[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
