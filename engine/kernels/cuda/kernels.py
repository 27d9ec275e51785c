"""The engine's kernels on a GPU, on torch tensors: the functions of `engine.kernels.cpu`, launched."""

import math
from typing import NamedTuple

import torch

from engine.kernels.cuda import attention_float, attention_tensor
from engine.kernels.cuda.catalog import CATALOG, KernelSpec
from engine.kernels.cuda.device_plan import DevicePlan
from engine.kernels.cuda.launcher import Launcher
from engine.kernels.cuda.plan import Heads, Tuning
from engine.kernels.cuda.reductions import WARP
from engine.kernels.cuda.specs import ELEMENTS, attention_spec, decoder_specs, rope_spec

PAGE = 16
Tensor = torch.Tensor


class HeadNorms(NamedTuple):
    """RMS norm of every query and key head before it is rotated (Qwen3); weights float32 [D]."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class CudaKernels:
    """All tensors are contiguous and on the launcher's device. "Elements" are float32, bfloat16 or float16,
    one type for a whole call; accumulation is float32."""

    def __init__(self, launcher: Launcher, tuning: Tuning | None = None) -> None:
        self.launcher = launcher
        self.tuning = tuning or Tuning()

    def prepare(self, dtype: torch.dtype, head_dim: int, group: int, normed: bool) -> None:
        """Compiles and loads at once what a decoder of this shape launches."""
        self.launcher.prepare(decoder_specs(ELEMENTS[dtype], head_dim, group, normed, self.tuning))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """x float32 [T, H], weight float32 [H], out elements [T, H]."""
        spec, rows = KernelSpec("rms_norm", ELEMENTS[out.dtype]), x.shape[0]
        self._launch_rows(spec, rows, x, weight, out, x.shape[1], eps)

    def add_rms_norm(self, residual: Tensor, delta: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """residual float32 [T, H] += delta, out = its norm; delta and out elements [T, H]."""
        spec, rows = KernelSpec("add_rms_norm", ELEMENTS[out.dtype]), out.shape[0]
        self._launch_rows(spec, rows, residual, delta, weight, out, out.shape[1], eps)

    def silu_mul(self, gate_up: Tensor, out: Tensor) -> None:
        """out [T, I] = silu(gate) · up of gate_up [T, 2I]; elements."""
        threads = self._threads("silu_mul")
        grid = out.shape[0], -(-out.shape[1] // threads), 1
        spec = KernelSpec("silu_mul", ELEMENTS[out.dtype])
        self.launcher.launch(spec, grid, (threads, 1, 1), gate_up, out, out.shape[1])

    def rope_write_kv(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        q_out: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        norms: HeadNorms | None = None,
    ) -> None:
        """Rotates (halves) and scatters the rows of qkv [T, (Hq + 2 Hkv) · D].

        cos, sin float32 [P, D/2]; positions, slot_mapping int32 [T] (slot -1: nothing is written); q_out
        [T, Hq, D], caches [num_blocks, Hkv, 16, D]; all else elements.
        """
        spec = rope_spec(ELEMENTS[qkv.dtype], q_out.shape[2], norms is not None)
        # Without norms their pointers are not read.
        q_weight, k_weight, eps = norms or (cos, cos, 0.0)
        self.launcher.launch(
            spec, (qkv.shape[0], 1, 1), (WARP, self._threads(spec.name) // WARP, 1),
            qkv, cos, sin, positions, slot_mapping, q_weight, k_weight, q_out, k_cache, v_cache,
            q_out.shape[1], k_cache.shape[1], eps,
        )  # fmt: skip

    def write_kv(self, k: Tensor, v: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
        """k, v elements [T, Hkv, D] to their slots; slot -1 is padding."""
        spec = KernelSpec("write_kv", ELEMENTS[k.dtype])
        rows, num_heads, head_dim = k.shape
        self._launch_rows(spec, rows, k, v, slot_mapping, k_cache, v_cache, num_heads, head_dim)

    def gather_blocks(self, cache: Tensor, blocks: Tensor, out: Tensor) -> None:
        """out [Hkv, n · 16, D] = blocks int32 [n] of a cache [num_blocks, Hkv, 16, D], of the same type."""
        grid = blocks.shape[0], cache.shape[1], 1
        words = PAGE * cache.shape[3] * cache.element_size() // 4
        spec = KernelSpec("gather_blocks", ELEMENTS[cache.dtype])
        self.launcher.launch(spec, grid, (self._threads(spec.name), 1, 1), cache, blocks, out, words)

    def copy_blocks(self, k_cache: Tensor, v_cache: Tensor, src: Tensor, dst: Tensor) -> None:
        """Blocks src to dst, int32 [n], in caches [num_blocks, Hkv, 16, D]; or [L, …] for all layers at once.

        No block is both a source and a target.
        """
        block_words = k_cache[..., 0, :, :, :].shape[-3:].numel() * k_cache.element_size() // 4
        grid = src.shape[0], _num_layers(k_cache), 2
        spec = KernelSpec("copy_blocks", ELEMENTS[k_cache.dtype])
        self.launcher.launch(
            spec, grid, (self._threads(spec.name), 1, 1),
            k_cache, v_cache, src, dst, block_words, _layer_words(k_cache),
        )  # fmt: skip

    def compact_kv(
        self, k_cache: Tensor, v_cache: Tensor, src_slots: Tensor, dst_slots: Tensor, cu_moves: Tensor
    ) -> None:
        """Moves slots: for each of S sequences its moves cu_moves[s]..cu_moves[s + 1], int32, in order.

        Caches as for copy_blocks; sequences touch no slot of each other.
        """
        words = k_cache.shape[-1] * k_cache.element_size() // 4
        grid = cu_moves.shape[0] - 1, _num_layers(k_cache), 2
        spec = KernelSpec("compact_kv", ELEMENTS[k_cache.dtype])
        self.launcher.launch(
            spec, grid, (self._threads(spec.name), 1, 1),
            k_cache, v_cache, src_slots, dst_slots, cu_moves, k_cache.shape[-3], words, _layer_words(k_cache),
        )  # fmt: skip

    def heads(self, num_heads: int, num_kv_heads: int, dtype: torch.dtype) -> Heads:
        """What `plan_attention` must know of the model and its kernels."""
        group = num_heads // num_kv_heads
        if dtype == torch.float32:
            return Heads(num_kv_heads, group, attention_float.ROWS, attention_float.ROWS)
        rows = attention_tensor.ROWS
        return Heads(num_kv_heads, group, rows, rows * self.tuning.row_warps)

    def paged_attention(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: DevicePlan, scale: float, out: Tensor
    ) -> None:
        """q, out [T, Hq, D], caches [num_blocks, Hkv, 16, D]; elements. `plan` says who sees what."""
        _, num_heads, head_dim = q.shape
        num_merged, num_kv_heads = plan.merged_queries.shape[0], k_cache.shape[1]
        partial = q.new_empty(plan.num_splits, num_merged, num_heads, head_dim, dtype=torch.float32)
        stats = q.new_empty(plan.num_splits, num_merged, num_heads, 2, dtype=torch.float32)
        element = ELEMENTS[q.dtype]
        for phase in plan.phases:
            spec = attention_spec(element, head_dim, num_heads // num_kv_heads, phase.decodes, self.tuning)
            grid = phase.tiles.shape[0], num_kv_heads, phase.num_splits
            self.launcher.launch(
                spec, grid, (WARP, math.prod(spec.constants[2:]), 1),
                q, k_cache, v_cache, out, partial, stats,
                phase.tiles, plan.query_ids, plan.block_tables, plan.visible, plan.ancestors,
                plan.partial_rows, plan.block_tables.shape[1], num_merged, scale * math.log2(math.e),
            )  # fmt: skip
        if num_merged:
            spec = KernelSpec("merge_splits", element, (head_dim,))
            self.launcher.launch(
                spec, (num_merged, num_heads, 1), (WARP, 1, 1),
                partial, stats, plan.merged_queries, plan.merged_splits, out,
            )  # fmt: skip

    def verify_drafts(
        self, drafts: Tensor, targets: Tensor, num_drafts: Tensor, accepted: Tensor, next_token: Tensor
    ) -> None:
        """drafts [B, K], targets [B, K + 1], num_drafts [B]; results accepted [B], next_token [B]; int32."""
        rows, width = drafts.shape
        self._launch_threads(
            "verify_drafts", rows, drafts, targets, num_drafts, accepted, next_token, rows, width
        )

    def verify_tree(
        self,
        tokens: Tensor,
        parents: Tensor,
        num_nodes: Tensor,
        targets: Tensor,
        accepted: Tensor,
        path: Tensor,
        next_token: Tensor,
    ) -> None:
        """tokens, parents, targets [B, N] (node 0 is the last known token, a node comes after its parent),
        num_nodes [B]; results accepted [B], path [B, N] (the accepted nodes), next_token [B]; int32."""
        rows, width = tokens.shape
        self._launch_threads(
            "verify_tree", rows,
            tokens, parents, num_nodes, targets, accepted, path, next_token, rows, width,
        )  # fmt: skip

    def sample_rows(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        choices: Tensor,
        positions: Tensor,
        out: Tensor,
    ) -> None:
        """As `engine.kernels.sampling.sample_rows`: logits float32 [R, V]; temperature, top_p, min_p float32,
        top_k and out int32, seeds, choices, positions (u)int64, each [R]."""
        self._launch_rows(
            KernelSpec("sample_rows", "float32"), logits.shape[0],
            logits, temperature, top_k, top_p, min_p, seeds, choices, positions, out, logits.shape[1],
        )  # fmt: skip

    def _launch_rows(self, spec: KernelSpec, rows: int, *arguments: Tensor | int | float) -> None:
        """One block a row."""
        self.launcher.launch(spec, (rows, 1, 1), (self._threads(spec.name), 1, 1), *arguments)

    def _launch_threads(self, name: str, rows: int, *arguments: Tensor | int | float) -> None:
        """One thread a row."""
        threads = self._threads(name)
        grid = -(-rows // threads), 1, 1
        self.launcher.launch(KernelSpec(name, "float32"), grid, (threads, 1, 1), *arguments)

    def _threads(self, name: str) -> int:
        return min(CATALOG[name].max_threads, self.tuning.max_threads)


def _num_layers(cache: Tensor) -> int:
    return cache.shape[0] if cache.dim() == 5 else 1


def _layer_words(cache: Tensor) -> int:
    return cache.stride(0) * cache.element_size() // 4 if cache.dim() == 5 else 0
