"""Sums over the 32 threads of a warp and over a block, as device functions inlined into kernels."""

from typing import Any

from numba.cuda import types

WARP = 32
ALL_LANES = 0xFFFFFFFF


def warp_sum(cuda: Any) -> Any:
    @cuda.jit(device=True, inline="always")
    def total_of(value: Any) -> Any:
        """The same sum in every lane."""
        for step in (16, 8, 4, 2, 1):
            value += cuda.shfl_xor_sync(ALL_LANES, value, step)
        return value

    return total_of


def block_sum(cuda: Any) -> Any:
    sum_in_warp = warp_sum(cuda)

    @cuda.jit(device=True, inline="always")
    def total_of(value: Any) -> Any:
        """The same float32 sum in every thread of a one-dimensional block of whole warps."""
        partial = cuda.shared.array(WARP, types.float32)
        value = sum_in_warp(value)
        if cuda.threadIdx.x % WARP == 0:
            partial[cuda.threadIdx.x // WARP] = value
        cuda.syncthreads()
        total = partial[0]
        for warp in range(1, cuda.blockDim.x // WARP):
            total += partial[warp]
        cuda.syncthreads()
        return total

    return total_of
