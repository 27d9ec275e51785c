"""The model's small operations on a CPU: our kernels behind torch tensors."""

import torch

from engine.batch import Batch
from engine.kernels import cpu
from engine.kv_pool import KVPool


def as_pages(pages: torch.Tensor) -> "cpu.Cache":
    """Pages as numpy; numpy has no bfloat16, so its bits travel as uint16."""
    array: cpu.Cache = (pages.view(torch.uint16) if pages.dtype == torch.bfloat16 else pages).numpy()
    return array


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    cpu.rms_norm(x.numpy(), weight.numpy(), eps, out.numpy())
    return out


def add_rms_norm(
    residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Adds delta to residual in place and answers the normalised sum."""
    out = torch.empty_like(residual)
    cpu.add_rms_norm(residual.numpy(), delta.numpy(), weight.numpy(), eps, out.numpy())
    return out


def rope_write_kv(
    qkv: torch.Tensor,
    rope: tuple[torch.Tensor, torch.Tensor],
    batch: Batch,
    kv: KVPool,
    layer: int,
    num_heads: int,
) -> torch.Tensor:
    """Rotates q and k, writes k and v to their slots; answers q [T, num_heads, head_dim]."""
    keys, values = as_pages(kv.keys(layer)), as_pages(kv.values(layer))
    q = torch.empty(qkv.shape[0], num_heads, kv.pages.shape[-1])
    cos, sin = rope
    cpu.rope_write_kv(
        qkv.numpy(), cos.numpy(), sin.numpy(), batch.positions, batch.slot_mapping, q.numpy(), keys, values
    )
    return q


def attention(q: torch.Tensor, batch: Batch, kv: KVPool, layer: int, scale: float) -> torch.Tensor:
    """Causal attention over the pages; [T, num_heads * head_dim]."""
    out = torch.empty_like(q)
    keys, values = as_pages(kv.keys(layer)), as_pages(kv.values(layer))
    cpu.paged_attention(
        q.numpy(), keys, values, batch.block_tables, batch.cu_query_lens, batch.context_lens, scale,
        out.numpy(),
    )  # fmt: skip
    return out.view(q.shape[0], -1)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    cpu.silu_mul(gate_up.numpy(), out.numpy())
    return out
