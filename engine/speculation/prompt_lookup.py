"""Drafts from the sequence itself: what followed the last time its latest tokens occurred.

Source: prompt lookup decoding (Saxena 2023), with the match extended backwards.
"""

from weakref import WeakKeyDictionary

from engine.sequence import Sequence
from engine.speculation.drafter import DraftSource, DraftTree

MIN_MATCH = 3
MAX_MATCH = 32
# Older occurrences that are compared; the longest match goes first, the latest of equals.
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

    def __init__(self, max_branches: int = 1) -> None:
        """`max_branches`: continuations proposed where the latest tokens occurred more than once."""
        self._max_branches = max_branches
        self._indexes: WeakKeyDictionary[Sequence, _Index] = WeakKeyDictionary()

    def propose(self, sequence: Sequence, max_depth: int) -> DraftTree | None:
        tokens = sequence.tokens
        index = self._indexes.get(sequence)
        if index is None:
            index = self._indexes[sequence] = _Index()
        index.catch_up(tokens)
        ends = index.ends.get(tuple(tokens[-MIN_MATCH:]), [])[: -MAX_CANDIDATES - 1 : -1]
        if not ends:
            return None
        matches = sorted(((_match_length(tokens, end), end) for end in ends), key=lambda match: -match[0])
        branches = [tokens[end : end + min(max_depth, length)] for length, end in matches]
        return DraftTree.merged(branches[: self._max_branches], DraftSource.PROMPT_LOOKUP, matches[0][0])


def _match_length(tokens: list[int], end: int) -> int:
    """How many tokens before `end` equal the last ones."""
    length = MIN_MATCH
    while length < min(MAX_MATCH, end) and tokens[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length
