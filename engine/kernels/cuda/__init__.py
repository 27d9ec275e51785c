"""The engine's kernels on NVIDIA GPUs, written in Python for numba.

`kernels.CudaKernels` holds the functions; `plan` divides a batch's attention; `catalog` lists the kernels;
`compiler` makes machine code of them, without a GPU too; `launcher` runs them on torch's stream. A kernel is
made by a factory that gets numba's `cuda` and `primitives` as arguments, so that a simulator can run it too.
"""
