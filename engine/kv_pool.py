"""The KV pool: one tensor that holds every layer's pages."""

from dataclasses import dataclass

import torch

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

    def copy_blocks(self, src: list[int], dst: list[int]) -> None:
        """Copies whole pages in every layer (copy-on-write of a fork)."""
        if src:
            self.pages[:, :, dst] = self.pages[:, :, src]


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
    shape = num_layers, 2, num_blocks, num_kv_heads, BLOCK_SIZE, head_dim
    # Pages are zeroed so that a kernel that reads a page's unwritten tail never meets a NaN.
    return KVPool(torch.zeros(shape, dtype=dtype, device=device))
