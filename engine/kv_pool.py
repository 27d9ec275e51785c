"""The KV pool: one tensor that holds every layer's pages."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from engine.kernels import cpu

BLOCK_SIZE = 16


@dataclass(frozen=True)
class KVPool:
    """K and V of all layers: [num_layers, 2, num_blocks, num_kv_heads, BLOCK_SIZE, head_dim]."""

    pages: torch.Tensor

    @property
    def num_blocks(self) -> int:
        return self.pages.shape[2]

    def keys(self, layer: int) -> torch.Tensor:
        """[num_blocks, num_kv_heads, BLOCK_SIZE, head_dim]"""
        return self.pages[layer, 0]

    def values(self, layer: int) -> torch.Tensor:
        return self.pages[layer, 1]

    def as_numpy(self) -> cpu.Cache:
        """The pages of a pool on a CPU, not copied; numpy has no bfloat16: its bits travel as uint16."""
        pages = self.pages.view(torch.uint16) if self.pages.dtype == torch.bfloat16 else self.pages
        array: cpu.Cache = pages.numpy()
        return array


def block_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes one block takes over all layers."""
    return num_layers * 2 * num_kv_heads * BLOCK_SIZE * head_dim * dtype.itemsize


def allocate(
    num_layers: int,
    num_blocks: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> KVPool:
    """Zeroed, so that a kernel that reads a page's unwritten tail never meets a NaN."""
    shape = num_layers, 2, num_blocks, num_kv_heads, BLOCK_SIZE, head_dim
    if device is not None and device.type != "cpu":
        return KVPool(torch.zeros(shape, dtype=dtype, device=device))
    # numpy asks the system for huge pages, which are there, and cleared, when they are first used.
    num_bytes = math.prod(shape) * dtype.itemsize
    return KVPool(torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape))
