"""Acceptance of drafts by sample and match: a draft is kept while it is the token the target sampled."""

from typing import Any

from engine.kernels.cuda.parameters import Element, Int, Int32s, Kernel


def verify_drafts(cuda: Any, primitives: Any, element: Element) -> Kernel:
    """One thread a row: drafts [B, K], targets [B, K + 1] (sampled after each prefix of the drafts)."""

    def verify_drafts(
        drafts: Int32s,
        targets: Int32s,
        num_drafts: Int32s,
        accepted: Int32s,
        next_token: Int32s,
        num_rows: Int,
        width: Int,
    ) -> None:
        row = cuda.grid(1)
        if row < num_rows:
            count = 0
            while (
                count < num_drafts[row] and drafts[row * width + count] == targets[row * (width + 1) + count]
            ):
                count += 1
            accepted[row] = count
            next_token[row] = targets[row * (width + 1) + count]

    return verify_drafts


def verify_tree(cuda: Any, primitives: Any, element: Element) -> Kernel:
    """One thread a tree: walks from node 0, the last known token, to the child that equals the sampled token.

    tokens, parents, targets [B, N]; a node comes after its parent; targets holds what was sampled after each
    node. path [B, N] gets the accepted nodes in order.
    """

    def verify_tree(
        tokens: Int32s,
        parents: Int32s,
        num_nodes: Int32s,
        targets: Int32s,
        accepted: Int32s,
        path: Int32s,
        next_token: Int32s,
        num_rows: Int,
        width: Int,
    ) -> None:
        row = cuda.grid(1)
        if row < num_rows:
            start, at, count = row * width, 0, 0
            for node in range(1, num_nodes[row]):
                if parents[start + node] == at and tokens[start + node] == targets[start + at]:
                    path[start + count] = node
                    count += 1
                    at = node
            accepted[row] = count
            next_token[row] = targets[start + at]

    return verify_tree
