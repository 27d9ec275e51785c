"""RMS normalisation of float32 rows, with the addition to the residual stream that comes before it."""

import math
from typing import Any

import numpy as np

from engine.kernels.cuda.parameters import Element, Elements, Float, Float32s, Int, Kernel
from engine.kernels.cuda.reductions import block_sum


def rms_norm(cuda: Any, primitives: Any, element: Element) -> Kernel:
    """One block a row: out = x / sqrt(mean(x²) + eps) · weight."""
    narrow = primitives.CODECS[element].narrow
    sum_in_block = block_sum(cuda)

    def rms_norm(x: Float32s, weight: Float32s, out: Elements, width: Int, eps: Float) -> None:
        row = cuda.blockIdx.x * width
        squares = np.float32(0.0)
        for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
            squares += x[row + i] * x[row + i]
        scale = np.float32(1.0) / math.sqrt(sum_in_block(squares) / np.float32(width) + eps)
        for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
            out[row + i] = narrow(x[row + i] * scale * weight[i])

    return rms_norm


def add_rms_norm(cuda: Any, primitives: Any, element: Element) -> Kernel:
    """One block a row: residual += delta, then out is the norm of residual."""
    widen, narrow = primitives.CODECS[element]
    sum_in_block = block_sum(cuda)

    def add_rms_norm(
        residual: Float32s, delta: Elements, weight: Float32s, out: Elements, width: Int, eps: Float
    ) -> None:
        row = cuda.blockIdx.x * width
        squares = np.float32(0.0)
        for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
            x = residual[row + i] + widen(delta[row + i])
            residual[row + i] = x
            squares += x * x
        scale = np.float32(1.0) / math.sqrt(sum_in_block(squares) / np.float32(width) + eps)
        for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
            out[row + i] = narrow(residual[row + i] * scale * weight[i])

    return add_rms_norm
