"""Who sees whom where a batch verifies trees of drafts."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Tree(NamedTuple):
    """Each query sees the tokens before `visible` [T] and those nodes after them whose bit is set in
    `ancestors` [T] (int64; a node's own bit included; a tree has at most 64 nodes; 0 where there is none)."""

    visible: npt.NDArray[np.int32]
    ancestors: npt.NDArray[np.int64]


def causal(cu_query_lens: npt.NDArray[np.int32], context_lens: npt.NDArray[np.int32]) -> Tree:
    """No tree: the last rows of each context, each of which sees all tokens up to its own."""
    num_rows = np.diff(cu_query_lens)
    before = np.repeat(context_lens - cu_query_lens[1:], num_rows)
    visible = before + np.arange(1, cu_query_lens[-1] + 1, dtype=np.int32)
    return Tree(visible.astype(np.int32), np.zeros(len(visible), np.int64))
