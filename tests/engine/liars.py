"""Drafters for tests: they lie, know what comes, or both; in chains and in trees."""

import random
from collections.abc import Callable

from engine.sequence import Sequence
from engine.speculation.drafter import DraftSource, DraftTree


class LyingDrafter:
    """Proposes random tokens, sometimes right ones first: `truth` answers a sequence's real continuation."""

    def __init__(
        self, seed: int, truth: Callable[[Sequence], list[int]] = lambda sequence: [], max_branches: int = 1
    ) -> None:
        self._rng = random.Random(seed)
        self._truth = truth
        self._max_branches = max_branches

    def propose(self, sequence: Sequence, max_depth: int) -> DraftTree | None:
        if self._rng.random() < 0.2:
            return None
        branches = [
            self._branch(sequence, max_depth) for _ in range(self._rng.randint(1, self._max_branches))
        ]
        tree = DraftTree.merged(branches, DraftSource.PROMPT_LOOKUP)
        return self._shuffled(tree) if tree.tokens else None

    def _branch(self, sequence: Sequence, max_depth: int) -> list[int]:
        right = self._truth(sequence)[: self._rng.randint(0, max_depth)]
        wrong = [self._rng.randrange(32) for _ in range(self._rng.randint(0, 4))]
        return (right + wrong)[:max_depth]

    def _shuffled(self, tree: DraftTree) -> DraftTree:
        """The same tree, its nodes in another order that puts parents first."""
        keys = [0.0]
        for parent in tree.parents:
            keys.append(keys[parent] + self._rng.random())
        order = sorted(range(len(keys)), key=lambda node: keys[node])
        place = {node: i for i, node in enumerate(order)}
        tokens = [tree.tokens[node - 1] for node in order[1:]]
        return DraftTree(tokens, [place[tree.parents[node - 1]] for node in order[1:]], tree.source)
