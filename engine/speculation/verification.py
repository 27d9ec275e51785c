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
    shape = len(drafts), 1 + max(len(draft.tokens) for draft in drafts)
    tokens, parents, sampled, path = np.zeros((4, *shape), np.int32)
    num_nodes, accepted, following = np.zeros((3, len(drafts)), np.int32)
    for row, (draft, target) in enumerate(zip(drafts, targets, strict=True)):
        num_nodes[row] = size = len(target)
        tokens[row, 1:size], parents[row, 1:size], sampled[row, :size] = draft.tokens, draft.parents, target
    cpu.verify_tree(tokens, parents, num_nodes, sampled, accepted, path, following)
    return [nodes[:count].tolist() for nodes, count in zip(path, accepted, strict=True)]
