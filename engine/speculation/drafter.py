"""The seam between whoever guesses tokens and the scheduler that has them verified."""

from collections.abc import Iterable
from enum import Enum
from functools import cached_property
from typing import Protocol

from engine.sequence import Sequence


class DraftSource(Enum):
    SHARED_INDEX = "shared_index"
    PROMPT_LOOKUP = "prompt_lookup"
    DRAFT_MODEL = "draft_model"


class DraftTree:
    """Tokens guessed to follow a sequence's tokens.

    Node 0 is the sequence's last token, node i + 1 is tokens[i]; parents[i] is the node it follows, one of
    those before it. A chain is a tree with one branch.
    """

    def __init__(
        self, tokens: list[int], parents: list[int], source: DraftSource, match_length: int = 0
    ) -> None:
        """match_length: tokens before node 1 that were like this before, where the draft rests on that."""
        self.tokens = tokens
        self.parents = parents
        self.source = source
        self.match_length = match_length

    @classmethod
    def chain(cls, tokens: list[int], source: DraftSource, match_length: int = 0) -> "DraftTree":
        return cls(tokens, list(range(len(tokens))), source, match_length)

    @classmethod
    def merged(cls, branches: Iterable[list[int]], source: DraftSource, match_length: int = 0) -> "DraftTree":
        """Branches that begin with the same tokens share their nodes."""
        tree = cls([], [], source, match_length)
        nodes: dict[tuple[int, int], int] = {}  # by parent and token
        for branch in branches:
            at = 0
            for token in branch:
                if (at, token) not in nodes:
                    tree.tokens.append(token)
                    tree.parents.append(at)
                    nodes[at, token] = len(tree.tokens)
                at = nodes[at, token]
        return tree

    def restricted(self, nodes: Iterable[int]) -> "DraftTree":
        """Only these nodes, ascending; with a node its parent is among them."""
        kept = {0: 0}
        for node in nodes:
            kept[node] = len(kept)
        chosen = [node - 1 for node in kept if node]
        return DraftTree(
            [self.tokens[i] for i in chosen],
            [kept[self.parents[i]] for i in chosen],
            self.source,
            self.match_length,
        )

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(len(self.parents)))

    def children(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents, 1) if parent == node]

    @cached_property
    def paths(self) -> list[list[int]]:
        """Of each node, node 0 included: the tokens from behind node 0 up to it."""
        paths: list[list[int]] = [[]]
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append([*paths[parent], token])
        return paths

    @property
    def depths(self) -> list[int]:
        """Of each drafted node; those behind node 0 are 1."""
        return [len(path) for path in self.paths[1:]]

    @property
    def ancestors(self) -> list[int]:
        """Of each drafted node: the bits of the nodes on its way, itself included; bit i is node i + 1."""
        masks = [0]
        for i, parent in enumerate(self.parents):
            masks.append(masks[parent] | 1 << i)
        return masks[1:]


class Drafter(Protocol):
    def propose(self, sequence: Sequence, max_depth: int) -> DraftTree | None:
        """Branches of at most `max_depth` (>= 1) tokens that may follow; None when it has no idea."""
        ...
