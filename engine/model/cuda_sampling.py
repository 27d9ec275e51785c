"""Sampling where the logits are: only the parameters go to the GPU, only the tokens come back."""

import numpy as np
import torch

from engine.kernels.cuda.kernels import CudaKernels
from engine.kernels.cuda.packing import Array, PackedArrays
from engine.kernels.sampling import DrawParameters, Int32


def sample_rows(kernels: CudaKernels, logits: torch.Tensor, parameters: DrawParameters) -> Int32:
    """Token ids [R]; as `engine.kernels.sampling.sample_rows`, but logits [R, V] are a tensor."""
    arrays: list[Array] = list(parameters)
    packed = PackedArrays(arrays, logits.device)
    packed.send(arrays)
    out = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
    temperature, top_k, top_p, min_p, seeds, choices, positions = packed.tensors
    kernels.sample_rows(logits.contiguous(), temperature, top_k, top_p, min_p, seeds, choices, positions, out)
    tokens: Int32 = out.cpu().numpy().astype(np.int32, copy=False)
    return tokens
