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
