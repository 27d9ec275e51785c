"""Linear layers on a CPU: the fastest product for the weight's type, the machine and the number of rows."""

from typing import Protocol

import torch

from engine.kernels import cpu

# Up to this many rows our own kernel, which reads 2-byte weights, beats oneDNN on 4-byte ones: there a
# step is bound by reading weights.
MAX_ROWS_OWN_KERNEL = 32
MAX_ROWS_OWN_KERNEL_WITH_BF16_UNITS = 3


class Linear(Protocol):
    num_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [T, K] to float32 [T, N]."""
        ...


class Float32Linear:
    """oneDNN on weights it has packed once."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.num_bytes = weight.numel() * 4
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.float().contiguous(), 64)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


class Bfloat16Linear:
    """bfloat16 weights: few rows by our own kernel, many by oneDNN.

    On processors without bfloat16 units oneDNN gets the rounded weights widened to float32.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        weight = weight.to(torch.bfloat16).contiguous()
        self.num_bytes = weight.numel() * 2
        self._num_outputs = weight.shape[0]
        self._bias = bias
        self._few = cpu.pack_weight(weight.view(torch.uint16).numpy())
        self._native = torch.cpu._is_avx512_bf16_supported()
        self._max_few = MAX_ROWS_OWN_KERNEL_WITH_BF16_UNITS if self._native else MAX_ROWS_OWN_KERNEL
        many = weight if self._native else weight.float()
        self._many = torch.ops.mkldnn._reorder_linear_weight(many, 64)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self._max_few:
            rows = x.to(torch.bfloat16) if self._native else x
            many: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                rows, self._many, None, "none", [], ""
            ).float()
            return many if self._bias is None else many.add_(self._bias)
        out = torch.empty(x.shape[0], self._num_outputs)
        cpu.matmul(x.numpy(), self._few, out.numpy())
        return out if self._bias is None else out.add_(self._bias)


def make_linear(weight: torch.Tensor, dtype: torch.dtype, bias: torch.Tensor | None = None) -> Linear:
    if dtype == torch.float32:
        return Float32Linear(weight, bias)
    return Bfloat16Linear(weight, bias)
