"""Sampling where the logits are: only the parameters go to the GPU, only the tokens come back."""

import numpy as np
import torch

from engine.kernels.cuda.kernels import CudaKernels
from engine.kernels.cuda.packing import Array, PackedArrays
from engine.kernels.sampling import Float32, Int32, Int64, UInt64


def sample_rows(
    kernels: CudaKernels,
    logits: torch.Tensor,
    temperature: Float32,
    top_k: Int32,
    top_p: Float32,
    min_p: Float32,
    seeds: UInt64,
    choices: Int64,
    positions: Int64,
) -> Int32:
    """Token ids [R]; as `engine.kernels.sampling.sample_rows`, but logits [R, V] are a tensor."""
    arrays: list[Array] = [temperature, top_k, top_p, min_p, seeds, choices, positions]
    packed = PackedArrays(arrays, logits.device)
    packed.send(arrays)
    out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    temperatures, top_ks, top_ps, min_ps, seed, choice, position = packed.tensors
    kernels.sample_rows(
        logits.contiguous(), temperatures, top_ks, top_ps, min_ps, seed, choice, position, out
    )
    tokens: Int32 = out.cpu().numpy().astype(np.int32, copy=False)
    return tokens
