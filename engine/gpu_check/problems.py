"""Attention problems with known answers: a paged cache, sequences in scattered blocks, their plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from engine.gpu_check import references
from engine.kernels.cuda.device_plan import DevicePlan, arrays_of, device_plan
from engine.kernels.cuda.kernels import CudaKernels
from engine.kernels.cuda.packing import PackedArrays
from engine.kernels.cuda.plan import SharedPrefix, plan_attention
from engine.kernels.tree import Tree

PAGE = 16


@dataclass(frozen=True)
class Problem:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: list[list[int]]
    query_lens: list[int]
    context_lens: list[int]

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    def expected(self, sees: Sequence[torch.Tensor] | None = None) -> torch.Tensor:
        return references.paged_attention(
            self.q, self.k_cache, self.v_cache, self.block_tables, self.query_lens, self.context_lens,
            self.scale, sees,
        )  # fmt: skip

    def plan(
        self, kernels: CudaKernels, tree: Tree | None = None, prefixes: Sequence[SharedPrefix] = ()
    ) -> DevicePlan:
        heads = kernels.heads(self.q.shape[1], self.k_cache.shape[1], self.q.dtype)
        cu_query_lens = np.cumsum([0, *self.query_lens]).astype(np.int32)
        context_lens = np.array(self.context_lens, np.int32)
        plan = plan_attention(cu_query_lens, context_lens, heads, kernels.tuning, tree, prefixes)
        width = max(len(table) for table in self.block_tables)
        tables = np.array([table + [0] * (width - len(table)) for table in self.block_tables], np.int32)
        arrays = arrays_of(plan, tables)
        packed = PackedArrays(arrays, self.q.device)
        packed.send(arrays)
        return device_plan(plan, packed.tensors)

    def answer(
        self, kernels: CudaKernels, tree: Tree | None = None, prefixes: Sequence[SharedPrefix] = ()
    ) -> torch.Tensor:
        out = torch.full_like(self.q, torch.nan)
        plan = self.plan(kernels, tree, prefixes)
        kernels.paged_attention(self.q, self.k_cache, self.v_cache, plan, self.scale, out)
        return out.float()


def problem(
    dtype: torch.dtype,
    query_lens: list[int],
    context_lens: list[int],
    *,
    num_kv_heads: int = 1,
    group: int = 3,
    head_dim: int = 64,
    num_shared_blocks: int = 0,
    device: torch.device | None = None,
) -> Problem:
    """Sequences in shuffled blocks, the first num_shared_blocks of which all of them share."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    counts = [-(-length // PAGE) - num_shared_blocks for length in context_lens]
    num_blocks = num_shared_blocks + sum(counts) + 1
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    shared, own = order[:num_shared_blocks], order[num_shared_blocks:]
    starts = np.cumsum([0, *counts])
    return Problem(
        q=normal(sum(query_lens), num_kv_heads * group, head_dim),
        k_cache=normal(num_blocks, num_kv_heads, PAGE, head_dim),
        v_cache=normal(num_blocks, num_kv_heads, PAGE, head_dim),
        block_tables=[shared + own[a:b] for a, b in pairwise(starts)],
        query_lens=query_lens,
        context_lens=context_lens,
    )
