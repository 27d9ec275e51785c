"""Linear layers on a GPU: torch's, whose products of 2-byte elements run on tensor cores."""

from typing import NamedTuple

import torch


class CudaLinear(NamedTuple):
    """Elements [T, K] to elements [T, N], float32 inside."""

    weight: torch.Tensor  # [N, K]
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)


class CudaHead(NamedTuple):
    """Elements [R, H] to float32 logits [R, vocab], never rounded to the elements' type."""

    weight: torch.Tensor  # [vocab, H]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        if not hidden.is_cuda or hidden.dtype == torch.float32:
            return hidden.float() @ self.weight.float().T
        return torch.mm(hidden, self.weight.T, out_dtype=torch.float32)
