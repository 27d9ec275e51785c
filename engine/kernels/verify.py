# mypy: allow-untyped-defs, allow-untyped-calls
"""Acceptance of draft tokens by sample and match."""

import numpy as np

from engine.kernels.jit import kernel


@kernel
def verify_drafts(drafts, targets, num_drafts, accepted, next_token):
    """How many drafts of each row match the tokens sampled in their places, and the token that follows them.

    drafts [B, K], targets [B, K + 1] (the token sampled after each prefix of the drafts), num_drafts [B];
    results accepted [B] and next_token [B]; all int32.
    """
    for row in range(drafts.shape[0]):
        # Without a branch on the outcome: where acceptance is a coin toss, guessing it wrong costs more than
        # looking at all.
        count = np.int32(0)
        matching = np.int32(1)
        for index in range(num_drafts[row]):
            matching &= np.int32(drafts[row, index] == targets[row, index])
            count += matching
        accepted[row] = count
        next_token[row] = targets[row, count]


@kernel
def verify_tree(tokens, parents, num_nodes, targets, accepted, path, next_token):
    """Walks each tree from node 0, the last known token, to the child that equals the sampled token.

    tokens, parents, targets [B, N] (a node comes after its parent; targets holds what was sampled after each
    node), num_nodes [B]; results accepted [B], path [B, N] (the accepted nodes in order) and next_token [B];
    all int32.
    """
    for row in range(tokens.shape[0]):
        at, count = np.int32(0), np.int32(0)
        for node in range(1, num_nodes[row]):
            if parents[row, node] == at and tokens[row, node] == targets[row, at]:
                path[row, count] = node
                count += 1
                at = np.int32(node)
        accepted[row] = count
        next_token[row] = targets[row, at]
