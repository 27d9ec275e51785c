"""Moving K/V where the pages are: only the numbers of blocks and slots go to the GPU."""

from collections.abc import Sequence

import numpy as np
import torch

from engine.kernels.cuda.kernels import CudaKernels
from engine.kernels.cuda.packing import Array, PackedArrays
from engine.kv_pool import KVPool
from engine.page_mover import Move, source_and_target_slots


class CudaPageMover:
    """A `PageMover`. Its work is queued, not waited for."""

    def __init__(self, kernels: CudaKernels, kv: KVPool) -> None:
        self._kernels = kernels
        self._keys, self._values = kv.pages[:, 0], kv.pages[:, 1]

    def copy_blocks(self, src: Sequence[int], dst: Sequence[int]) -> None:
        if src:
            blocks = self._send(np.array(src, np.int32), np.array(dst, np.int32))
            self._kernels.copy_blocks(self._keys, self._values, *blocks)

    def compact(self, moves: Sequence[Sequence[Move]]) -> None:
        if moves:
            cu_moves = np.cumsum([0, *map(len, moves)]).astype(np.int32)
            slots = self._send(*source_and_target_slots(moves), cu_moves)
            self._kernels.compact_kv(self._keys, self._values, *slots)

    def _send(self, *arrays: Array) -> list[torch.Tensor]:
        packed = PackedArrays(list(arrays), self._keys.device)
        packed.send(list(arrays))
        return packed.tensors
