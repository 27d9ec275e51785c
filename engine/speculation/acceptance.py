"""How likely drafted tokens are to be right, learned from those that were verified.

A guess rests on a match: the longer the text that has been like this before, the likelier it goes on as it
did then. A chain's later tokens are compared only after those before them were right, so their match is
longer. The rate of each length is learned from all sequences, and counts until enough is known of the one
that is drafted for.
"""

from collections.abc import Sequence as Rows

import numpy as np

from engine.sequence import PRIOR_ACCEPTANCE, Sequence
from engine.speculation.drafter import DraftSource, DraftTree

LONGEST = 32
# Until more is known, a match of one length is trusted little, of the other much.
_SHORT, _LONG = 3, 16
# Of a sequence; while nothing is drafted its acceptance slowly returns to hope, so that text that becomes
# predictable is noticed.
LEARNING_RATE = 0.15
FORGETTING_RATE = 0.004
# Of a length of match.
_COMMON_LEARNING_RATE = 0.05
_COMMON_WEIGHT = 4  # in verified tokens of a sequence


class Acceptance:
    def __init__(self) -> None:
        hoped = np.interp(range(LONGEST + 1), (_SHORT, _LONG), (0.6, 0.95)).tolist()
        self._rates: dict[DraftSource, list[float]] = {source: list(hoped) for source in DraftSource}

    def chances(self, sequence: Sequence, draft: DraftTree) -> list[float]:
        """Of each depth, 1 first, as many as there are tokens: that one is right if those before it are."""
        rates = self._rates[draft.source]
        lengths = (min(draft.match_length + depth, LONGEST) for depth in range(len(draft.tokens)))
        own = sequence.num_judged / (sequence.num_judged + _COMMON_WEIGHT)
        return [own * sequence.acceptance + (1 - own) * rates[length] for length in lengths]

    def learn(self, sequence: Sequence, draft: DraftTree, tokens: Rows[int]) -> None:
        """Every drafted token that was compared with one of the target's `tokens` was a hit or a miss."""
        rates, at = self._rates[draft.source], 0
        for depth, token in enumerate(tokens):
            length = min(draft.match_length + depth, LONGEST)
            for child in draft.children(at):
                hit = draft.tokens[child - 1] == token
                sequence.acceptance += LEARNING_RATE * (hit - sequence.acceptance)
                sequence.num_judged += 1
                rates[length] += _COMMON_LEARNING_RATE * (hit - rates[length])
                if hit:
                    at = child
                    break
            else:
                return

    def forget(self, sequence: Sequence) -> None:
        """Nothing is drafted for it in this step."""
        sequence.acceptance += FORGETTING_RATE * (PRIOR_ACCEPTANCE - sequence.acceptance)
