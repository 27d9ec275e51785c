"""The model's small operations on a GPU: our kernels on torch's current stream."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from engine.batch import Batch
from engine.kernels.cuda.device_plan import DevicePlan, arrays_of, device_plan
from engine.kernels.cuda.kernels import CudaKernels, HeadNorms
from engine.kernels.cuda.packing import Array, PackedArrays
from engine.kernels.cuda.plan import AttentionPlan, Int32, SharedPrefix, plan_attention
from engine.kv_pool import BLOCK_SIZE, KVPool

# Prefill chunks from this length on are torch's to attend to, on gathered pages.
LONG_PREFILL = 512
# Without cuDNN's, which is built anew for every length.
_LONG_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class LongPrefill(NamedTuple):
    """A sequence with many query rows: rows `first` to `last` of the batch."""

    first: int
    last: int
    context_len: int
    sequence: int  # row of the block tables


class DeviceBatch(NamedTuple):
    """What the kernels need of a batch: int32 tensors [T], the plan of its attention."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    logit_rows: torch.Tensor
    plan: DevicePlan
    long_prefills: tuple[LongPrefill, ...] = ()


class CudaOps:
    def __init__(
        self,
        kernels: CudaKernels,
        num_heads: int,
        num_kv_heads: int,
        dtype: torch.dtype,
    ) -> None:
        self.kernels = kernels
        self.dtype = dtype
        self.device = kernels.launcher.device
        self.heads = kernels.heads(num_heads, num_kv_heads, dtype)

    def to_device(self, batch: Batch) -> DeviceBatch:
        long = self._long_prefills(batch)
        elsewhere = [prefill.sequence for prefill in long]
        plan = plan_attention(
            batch.cu_query_lens, batch.context_lens, self.heads, self.kernels.tuning,
            batch.tree, shared_prefixes(batch, elsewhere), elsewhere,
        )  # fmt: skip
        arrays = batch_arrays(batch, plan, batch.block_tables)
        packed = PackedArrays(arrays, self.device)
        packed.send(arrays)
        return device_batch(plan, packed)._replace(long_prefills=long)

    def _long_prefills(self, batch: Batch) -> tuple[LongPrefill, ...]:
        if self.dtype == torch.float32:  # torch's fast attention is for 2-byte elements
            return ()
        starts = batch.cu_query_lens
        return tuple(
            LongPrefill(int(starts[s]), int(starts[s + 1]), int(batch.context_lens[s]), int(s))
            for s in np.flatnonzero(np.diff(starts) >= LONG_PREFILL)
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """float32 to the model's type."""
        out = torch.empty_like(x, dtype=self.dtype)
        self.kernels.rms_norm(x, weight, eps, out)
        return out

    def add_rms_norm(
        self, residual: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Adds delta to the float32 residual in place and answers the normalised sum."""
        out = torch.empty_like(delta)
        self.kernels.add_rms_norm(residual, delta, weight, eps, out)
        return out

    def rope_write_kv(
        self,
        qkv: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        batch: DeviceBatch,
        kv: KVPool,
        layer: int,
        num_heads: int,
        norms: HeadNorms | None = None,
    ) -> torch.Tensor:
        """Rotates q and k, writes k and v to their slots; answers q [T, num_heads, head_dim]."""
        q = qkv.new_empty(qkv.shape[0], num_heads, kv.pages.shape[-1])
        keys, values = kv.keys(layer), kv.values(layer)
        self.kernels.rope_write_kv(qkv, *rope, batch.positions, batch.slot_mapping, q, keys, values, norms)
        return q

    def attention(
        self, q: torch.Tensor, batch: DeviceBatch, kv: KVPool, layer: int, scale: float
    ) -> torch.Tensor:
        """Causal attention over the pages; [T, num_heads * head_dim]."""
        out = torch.empty_like(q)
        keys, values = kv.keys(layer), kv.values(layer)
        self.kernels.paged_attention(q, keys, values, batch.plan, scale, out)
        for prefill in batch.long_prefills:
            rows = slice(prefill.first, prefill.last)
            num_blocks = -(-prefill.context_len // BLOCK_SIZE)
            blocks = batch.plan.block_tables[prefill.sequence, :num_blocks]
            out[rows] = self._attend_long(q[rows], keys, values, blocks, prefill.context_len, scale)
        return out.view(q.shape[0], -1)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        self.kernels.silu_mul(gate_up, out)
        return out

    def _attend_long(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        blocks: torch.Tensor,
        context_len: int,
        scale: float,
    ) -> torch.Tensor:
        shape = k_cache.shape[1], blocks.shape[0] * BLOCK_SIZE, k_cache.shape[3]
        keys, values = k_cache.new_empty(shape), v_cache.new_empty(shape)
        self.kernels.gather_blocks(k_cache, blocks, keys)
        self.kernels.gather_blocks(v_cache, blocks, values)
        return attend_last(q, keys[:, :context_len], values[:, :context_len], scale)


def attend_last(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention by torch of the last n of L tokens: q [n, Hq, D], keys and values [Hkv, L, D]."""
    with sdpa_kernel(_LONG_BACKENDS):
        attended = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=causal_lower_right(q.shape[0], keys.shape[1]),
            scale=scale,
            enable_gqa=True,
        )
    return attended[0].transpose(0, 1)


def shared_prefixes(batch: Batch, without: Sequence[int] = ()) -> list[SharedPrefix]:
    """Who of the batch, but for some sequences, begins with the same blocks."""
    runs = batch.shared_runs
    group_of = runs.group_of.copy()
    group_of[list(without)] = -1
    members = [np.flatnonzero(group_of == group).tolist() for group in range(len(runs.group_lens))]
    return [
        SharedPrefix(tuple(sequences), int(length))
        for sequences, length in zip(members, runs.group_lens, strict=True)
        if len(sequences) > 1
    ]


def batch_arrays(batch: Batch, plan: AttentionPlan, block_tables: Int32) -> list[Array]:
    """What must be sent for `device_batch`."""
    return [
        batch.token_ids,
        batch.positions,
        batch.slot_mapping,
        batch.logit_rows,
        *arrays_of(plan, block_tables),
    ]


def device_batch(plan: AttentionPlan, packed: PackedArrays) -> DeviceBatch:
    token_ids, positions, slot_mapping, logit_rows, *rest = packed.tensors
    return DeviceBatch(token_ids, positions, slot_mapping, logit_rows, device_plan(plan, rest))
