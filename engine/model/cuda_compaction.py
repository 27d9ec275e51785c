"""Moving accepted drafts where the pages are: only the numbers of the slots go to the GPU."""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from engine.compaction import Move
from engine.kernels.cuda.kernels import CudaKernels
from engine.kernels.cuda.packing import Array, PackedArrays
from engine.kv_pool import KVPool


def compact(kernels: CudaKernels, kv: KVPool, moves: Sequence[Sequence[Move]]) -> None:
    """A `Compact` by these kernels: queued, not waited for."""
    src, dst = np.array(list(chain(*moves)), np.int32).T
    cu_moves = np.cumsum([0, *map(len, moves)]).astype(np.int32)
    arrays: list[Array] = [src, dst, cu_moves]
    packed = PackedArrays(arrays, kv.pages.device)
    packed.send(arrays)
    kernels.compact_kv(kv.pages[:, 0], kv.pages[:, 1], *packed.tensors)
