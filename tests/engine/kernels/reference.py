"""Plain torch versions of the CPU kernels, and random problems for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.cpu import Cache, Float32, Int32, Tree
from engine.kernels.pairs import multiplies_pairs

PAGE = 16
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def to_cache(values: torch.Tensor, dtype: str) -> Cache:
    """Float32 values as a kernel's cache: rounded, bfloat16 as uint16 bits."""
    rounded = values.to(TORCH_DTYPES[dtype])
    array: Cache = (rounded.view(torch.uint16) if dtype == "bfloat16" else rounded).numpy()
    return array


def from_cache(cache: Cache) -> torch.Tensor:
    values = torch.from_numpy(cache)
    return (values.view(torch.bfloat16) if cache.dtype == np.uint16 else values).float()


@dataclass(frozen=True)
class AttentionProblem:
    q: Float32  # [T, Hq, D]
    k_cache: Cache
    v_cache: Cache
    block_tables: Int32
    cu_query_lens: Int32
    context_lens: Int32
    scale: float


def attention_problem(
    contexts: Sequence[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    dim: int,
    dtype: str,
    seed: int = 0,
) -> AttentionProblem:
    """Sequences of (context length, new rows) over a shuffled pool; unused slots hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-length // PAGE) for length, _ in contexts]
    order = torch.randperm(sum(num_blocks) + 3, generator=generator).int().numpy()
    block_tables = np.zeros((len(contexts), max(num_blocks)), np.int32)
    shape = (len(order), num_kv_heads, PAGE, dim)
    keys, values = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    start = 0
    for row, ((length, _), count) in enumerate(zip(contexts, num_blocks, strict=True)):
        block_tables[row, :count] = order[start : start + count]
        start += count
        for cache in (keys, values):
            new = torch.randn(length, num_kv_heads, dim, generator=generator)
            for position in range(0, length, PAGE):
                part = new[position : position + PAGE].transpose(0, 1)
                cache[block_tables[row, position // PAGE], :, : part.shape[1]] = part
    cu_query_lens = np.cumsum([0] + [rows for _, rows in contexts], dtype=np.int32)
    q = torch.randn(int(cu_query_lens[-1]), num_heads, dim, generator=generator).numpy()
    lengths = np.array([length for length, _ in contexts], np.int32)
    caches = to_cache(keys, dtype), to_cache(values, dtype)
    return AttentionProblem(q, *caches, block_tables, cu_query_lens, lengths, dim**-0.5)


def attention(problem: AttentionProblem, tree: Tree | None = None) -> Float32:
    """Causal attention, or as the tree says, one sequence at a time, in float64."""
    out = np.empty_like(problem.q)
    num_kv_heads = problem.k_cache.shape[1]
    for s, length in enumerate(problem.context_lens.tolist()):
        begin, end = problem.cu_query_lens[s : s + 2].tolist()
        num_rows = end - begin
        blocks = problem.block_tables[s, : -(-length // PAGE)]
        keys, values = (
            from_cache(cache[blocks]).transpose(0, 1).flatten(1, 2)[:, :length].double()
            for cache in (problem.k_cache, problem.v_cache)
        )
        q = torch.from_numpy(problem.q[begin:end]).double().transpose(0, 1)
        groups = q.shape[0] // num_kv_heads
        visible = torch.arange(length) <= (length - num_rows + torch.arange(num_rows))[:, None]
        if tree is not None:
            visible = torch.stack([_seen(tree, row, length) for row in range(begin, end)])
        result = torch.nn.functional.scaled_dot_product_attention(
            q,
            keys.repeat_interleave(groups, 0),
            values.repeat_interleave(groups, 0),
            visible,
            scale=problem.scale,
        )
        out[begin:end] = result.transpose(0, 1).float().numpy()
    return out


def assert_close(actual: Float32, problem: AttentionProblem, tree: Tree | None = None) -> None:
    expected = attention(problem, tree)
    if multiplies_pairs(numba.from_dtype(problem.k_cache.dtype)):
        # Queries and weights are rounded to bfloat16 too.
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-2)
        assert np.abs(actual - expected).mean() < 1e-3
    else:
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=5e-6)


def _seen(tree: Tree, row: int, length: int) -> torch.Tensor:
    """Which of `length` keys a row sees."""
    visible, ancestors = int(tree.visible[row]), int(tree.ancestors[row])
    seen = [key < visible or bool(ancestors >> (key - visible) & 1) for key in range(length)]
    return torch.tensor(seen)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """NeoX rotation of x [T, heads, D] by cos, sin [T, D / 2]."""
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def rope_tables(num_positions: int, dim: int) -> tuple[Float32, Float32]:
    angles = torch.arange(num_positions)[:, None] * 10_000.0 ** (-torch.arange(0, dim, 2) / dim)
    return angles.cos().numpy(), angles.sin().numpy()


def bfloat16_bits(values: torch.Tensor) -> npt.NDArray[np.uint16]:
    bits: npt.NDArray[np.uint16] = values.to(torch.bfloat16).view(torch.uint16).numpy()
    return bits
