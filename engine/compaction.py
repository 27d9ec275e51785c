"""Accepted drafts: their K/V moves from the slots it was computed in to those of their positions."""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import numpy as np

from engine.kernels import cpu
from engine.kv_pool import KVPool

Move = tuple[int, int]  # from a slot, to a slot


class Compact(Protocol):
    def __call__(self, kv: KVPool, moves: Sequence[Sequence[Move]]) -> None:
        """Makes the moves in every layer; `moves` has those of one or more sequences.

        Those of a sequence come in order: a slot may be a target after it has been a source. Sequences touch
        no slot of each other. What runs on the pool next sees them done.
        """
        ...


def compact_on_cpu(kv: KVPool, moves: Sequence[Sequence[Move]]) -> None:
    """A `Compact`."""
    pages, (src, dst) = kv.as_numpy(), np.array(list(chain(*moves)), np.int32).T.copy()
    cpu.compact_kv(pages[:, 0], pages[:, 1], src, dst)
