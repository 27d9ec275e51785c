"""Drafters for tests: one that lies, one that knows, and one that does both."""

import random
from collections.abc import Callable

from engine.sequence import Sequence
from engine.speculation.drafter import Draft, DraftSource


class LyingDrafter:
    """Proposes random tokens, sometimes right ones first: `truth` answers a sequence's real continuation."""

    def __init__(self, seed: int, truth: Callable[[Sequence], list[int]] = lambda sequence: []) -> None:
        self._rng = random.Random(seed)
        self._truth = truth

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft | None:
        if self._rng.random() < 0.2:
            return None
        right = self._truth(sequence)[: self._rng.randint(0, max_tokens)]
        wrong = [self._rng.randrange(32) for _ in range(self._rng.randint(0, 4))]
        tokens = (right + wrong)[:max_tokens]
        return Draft(tokens, DraftSource.PROMPT_LOOKUP) if tokens else None
