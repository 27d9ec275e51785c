"""Puts together what the splits of an attention kernel, or its shared and own parts, found apart."""

from typing import Any

import numpy as np
from numba.cuda import types

from engine.kernels.cuda.parameters import Element, Elements, Float32s, Int32s, Kernel
from engine.kernels.cuda.reductions import WARP
from engine.kernels.cuda.tiles import LOWEST


def merge_splits(cuda: Any, primitives: Any, element: Element, head_dim: int) -> Kernel:
    """Grid (P, Hq), one warp: rows `queries` [P] of out [T, Hq, D] from partial [splits, P, Hq, D].

    num_splits [P] says how many splits a row has. stats [splits, P, Hq, 2] are the highest score (base 2) and
    the sum of weights relative to it; a sum of 0 says that the split met no token and wrote nothing else.
    """
    narrow = primitives.CODECS[element].narrow
    parts = head_dim // WARP

    def merge_splits(
        partial: Float32s, stats: Float32s, queries: Int32s, num_splits: Int32s, out: Elements
    ) -> None:
        row = cuda.blockIdx.x * cuda.gridDim.y + cuda.blockIdx.y
        num_rows = cuda.gridDim.x * cuda.gridDim.y
        lane = cuda.threadIdx.x
        splits = num_splits[cuda.blockIdx.x]
        top = LOWEST
        for split in range(splits):
            at = (split * num_rows + row) * 2
            if stats[at + 1] > 0:
                top = max(top, stats[at])
        total = np.float32(0.0)
        sums = cuda.local.array(parts, types.float32)
        for part in range(parts):
            sums[part] = np.float32(0.0)
        for split in range(splits):
            at = split * num_rows + row
            if stats[at * 2 + 1] > 0:
                weight = primitives.exp2(stats[at * 2] - top)
                total += weight * stats[at * 2 + 1]
                for part in range(parts):
                    sums[part] += weight * partial[at * head_dim + part * WARP + lane]
        target = queries[cuda.blockIdx.x] * cuda.gridDim.y + cuda.blockIdx.y
        scale = np.float32(1.0) / total if total > 0 else np.float32(0.0)  # a row of padding meets no token
        for part in range(parts):
            out[target * head_dim + part * WARP + lane] = narrow(sums[part] * scale)

    return merge_splits
