"""Sample and match: the target's own tokens are kept as long as somebody drafted them."""

from collections.abc import Sequence

import numpy as np

from engine.kernels import cpu
from engine.speculation.drafter import DraftTree


def accepted_paths(drafts: Sequence[DraftTree], targets: Sequence[Sequence[int]]) -> list[list[int]]:
    """Of each tree the nodes that were accepted, in order.

    targets: of each tree the token sampled after each node, node 0 included.
    """
    if not drafts:
        return []
    if all(draft.is_chain for draft in drafts):
        return [list(range(1, count + 1)) for count in _accepted_of_chains(drafts, targets)]
    shape = len(drafts), 1 + max(len(draft.tokens) for draft in drafts)
    tokens, parents, sampled, path = np.zeros((4, *shape), np.int32)
    num_nodes, accepted, following = np.zeros((3, len(drafts)), np.int32)
    for row, (draft, target) in enumerate(zip(drafts, targets, strict=True)):
        num_nodes[row] = size = len(target)
        tokens[row, 1:size], parents[row, 1:size], sampled[row, :size] = draft.tokens, draft.parents, target
    cpu.verify_tree(tokens, parents, num_nodes, sampled, accepted, path, following)
    return [nodes[:count].tolist() for nodes, count in zip(path, accepted, strict=True)]


def _accepted_of_chains(drafts: Sequence[DraftTree], targets: Sequence[Sequence[int]]) -> list[int]:
    """Of each chain the number of its tokens that were accepted."""
    size = max(len(draft.tokens) for draft in drafts)
    tokens, sampled = np.zeros((len(drafts), size), np.int32), np.zeros((len(drafts), size + 1), np.int32)
    num_drafts, accepted, following = np.zeros((3, len(drafts)), np.int32)
    for row, (draft, target) in enumerate(zip(drafts, targets, strict=True)):
        num_drafts[row] = count = len(draft.tokens)
        tokens[row, :count], sampled[row, : count + 1] = draft.tokens, target
    cpu.verify_drafts(tokens, sampled, num_drafts, accepted, following)
    counts: list[int] = accepted.tolist()
    return counts
