"""Moving K/V inside a pool: blocks that a fork copies, accepted drafts to the slots of their positions."""

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import numpy as np

from engine.kernels import cpu
from engine.kernels.simd import Int32
from engine.kv_pool import KVPool

Move = tuple[int, int]  # from a slot, to a slot


class PageMover(Protocol):
    """Works on one pool, in every layer. What runs on the pool next sees it done."""

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copies whole blocks (copy-on-write of a fork); none is both a source and a target."""
        ...

    def compact(self, moves: Sequence[Sequence[Move]]) -> None:
        """Makes the moves of one or more sequences; those of a sequence in order, so a slot may be a target
        after it has been a source. Sequences touch no slot of each other."""
        ...


def source_and_target_slots(moves: Sequence[Sequence[Move]]) -> Int32:
    """int32 [2, number of moves]"""
    return np.array(list(chain(*moves)), np.int32).reshape(-1, 2).T.copy()


class CpuPageMover:
    """A `PageMover`."""

    def __init__(self, kv: KVPool) -> None:
        pages = kv.as_numpy()
        self._keys, self._values = pages[:, 0], pages[:, 1]

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:
        cpu.copy_blocks(self._keys, self._values, np.array(src, np.int32), np.array(dst, np.int32))

    def compact(self, moves: Sequence[Sequence[Move]]) -> None:
        cpu.compact_kv(self._keys, self._values, *source_and_target_slots(moves))
