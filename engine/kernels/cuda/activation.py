"""The gated activation of the feed-forward network."""

import math
from typing import Any

import numpy as np

from engine.kernels.cuda.parameters import Element, Elements, Int, Kernel


def silu_mul(cuda: Any, primitives: Any, element: Element) -> Kernel:
    """Grid (rows, columns / threads): out = silu(gate) · up, gate_up [T, 2 · width], out [T, width]."""
    widen, narrow = primitives.CODECS[element]

    def silu_mul(gate_up: Elements, out: Elements, width: Int) -> None:
        row = cuda.blockIdx.x
        column = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
        if column < width:
            gate = widen(gate_up[row * 2 * width + column])
            up = widen(gate_up[(row * 2 + 1) * width + column])
            out[row * width + column] = narrow(gate / (np.float32(1.0) + math.exp(-gate)) * up)

    return silu_mul
