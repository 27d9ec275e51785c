"""Paged attention against torch: shapes, dtypes, ragged batches, shared runs of blocks."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.kernels import cpu
from tests.engine.kernels.reference import (
    PAGE,
    AttentionProblem,
    assert_close,
    attention,
    attention_problem,
    from_cache,
    to_cache,
)

# (context length, new rows)
DECODE = [(length, 1) for length in (1, 2, 15, 16, 17, 63, 64, 65, 100, 511, 512, 513, 1025, 3000)]
DRAFTS = [(2, 2), (18, 3), (40, 5), (64, 16), (520, 9), (1030, 13), (700, 2)]
CHUNKS = [(130, 130), (97, 97), (600, 200), (1000, 129), (64, 64)]
MIXED = [(40, 1), (300, 120), (0, 0), (17, 17), (1100, 6), (33, 1), (80, 33)]
HEADS = [(3, 3), (9, 3), (8, 2), (8, 1)]  # groups of 1, 3, 4, 8


def run(problem: AttentionProblem) -> cpu.Float32:
    out = np.full_like(problem.q, np.nan)
    cpu.paged_attention(
        problem.q, problem.k_cache, problem.v_cache, problem.block_tables, problem.cu_query_lens,
        problem.context_lens, problem.scale, out,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("dim", [64, 96, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize(
    "contexts", [DECODE, DRAFTS, CHUNKS, MIXED], ids=["decode", "drafts", "chunks", "mixed"]
)
def test_shapes(contexts: list[tuple[int, int]], num_heads: int, num_kv_heads: int, dim: int) -> None:
    problem = attention_problem(contexts, num_heads, num_kv_heads, dim, "bfloat16")
    assert_close(run(problem), problem)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes(dtype: str) -> None:
    problem = attention_problem(DRAFTS + MIXED, 9, 3, 64, dtype)
    assert_close(run(problem), problem)


def test_large_scores() -> None:
    """The softmax does not overflow; scores in the thousands are only known to some 1e-4."""
    problem = attention_problem([(700, 1), (90, 40)], 6, 2, 64, "float32")
    large = replace(problem, q=problem.q * 300)
    np.testing.assert_allclose(run(large), attention(large), rtol=1e-3, atol=1e-3)


def test_nothing_to_do() -> None:
    problem = attention_problem([(5, 5)], 2, 2, 64, "bfloat16")
    empty = replace(
        problem, q=problem.q[:0], block_tables=problem.block_tables[:0],
        context_lens=problem.context_lens[:0], cu_query_lens=np.zeros(1, np.int32),
    )  # fmt: skip
    assert run(empty).shape == (0, 2, 64)


def share(problem: AttentionProblem, members: list[int], num_blocks: int) -> AttentionProblem:
    """Gives all members the first blocks of the first one."""
    tables = problem.block_tables.copy()
    tables[members, :num_blocks] = tables[members[0], :num_blocks]
    return replace(problem, block_tables=tables)


def run_shared(problem: AttentionProblem, groups: list[tuple[list[int], int]]) -> cpu.Float32:
    """Groups of (members, number of shared blocks)."""
    group_of = np.full(len(problem.context_lens), -1, np.int32)
    group_blocks = np.zeros((len(groups), max(blocks for _, blocks in groups)), np.int32)
    for group, (members, num_blocks) in enumerate(groups):
        group_of[members] = group
        group_blocks[group, :num_blocks] = problem.block_tables[members[0], :num_blocks]
    group_lens = np.array([PAGE * blocks for _, blocks in groups], np.int32)
    out = np.full_like(problem.q, np.nan)
    cpu.paged_attention_shared(
        problem.q, problem.k_cache, problem.v_cache, problem.block_tables, problem.cu_query_lens,
        problem.context_lens, group_of, group_blocks, group_lens, problem.scale, out,
    )  # fmt: skip
    return out


def test_one_group() -> None:
    contexts = [(100 + 7 * i, 1) for i in range(16)]
    problem = share(attention_problem(contexts, 9, 3, 64, "bfloat16"), list(range(16)), 5)
    assert_close(run_shared(problem, [(list(range(16)), 5)]), problem)


def test_a_large_group_over_a_long_run() -> None:
    contexts = [(1400 + i, 1 + i % 3) for i in range(40)]
    members = list(range(40))
    problem = share(attention_problem(contexts, 8, 2, 64, "bfloat16"), members, 85)
    assert_close(run_shared(problem, [(members, 85)]), problem)


def test_groups_between_other_sequences() -> None:
    contexts = [(50, 1), (200, 2), (90, 1), (210, 5), (300, 150), (95, 1), (33, 33), (240, 1)]
    groups = [([1, 3, 7], 12), ([2, 5], 4), ([0], 2)]
    problem = attention_problem(contexts, 6, 2, 96, "bfloat16")
    for members, num_blocks in groups:
        problem = share(problem, members, num_blocks)
    assert_close(run_shared(problem, groups), problem)


def test_a_prefill_chunk_in_a_group() -> None:
    contexts = [(400, 150), (300, 1), (290, 1)]
    problem = share(attention_problem(contexts, 9, 3, 64, "bfloat16"), [0, 1, 2], 15)
    assert_close(run_shared(problem, [([0, 1, 2], 15)]), problem)


def test_a_tail_of_one_key() -> None:
    contexts = [(65, 1), (66, 2), (513, 1), (514, 2)]
    problem = attention_problem(contexts, 3, 1, 64, "float32")
    problem = share(share(problem, [0, 1], 4), [2, 3], 32)
    assert_close(run_shared(problem, [([0, 1], 4), ([2, 3], 32)]), problem)


def test_gathered_blocks() -> None:
    values = torch.randn(6, 2, PAGE, 64, generator=torch.Generator().manual_seed(0))
    blocks = np.array([4, 0, 5], np.int32)
    for dtype in ("float32", "bfloat16", "float16"):
        cache = to_cache(values, dtype)
        out = np.full((2, 3 * PAGE, 64), np.nan, np.float32)
        cpu.gather_blocks(cache, blocks, out)
        expected = from_cache(cache)[[4, 0, 5]].transpose(0, 1).reshape(2, -1, 64)
        np.testing.assert_array_equal(out, expected.numpy())


def test_copied_blocks() -> None:
    values = torch.randn(3, 6, 2, PAGE, 64, generator=torch.Generator().manual_seed(0))
    for dtype in ("float32", "bfloat16", "float16"):
        keys, others = to_cache(values, dtype).copy(), to_cache(values * 2, dtype).copy()
        expected = [cache[:, [0, 3, 2, 3, 5, 5]] for cache in (keys, others)]
        cpu.copy_blocks(keys, others, np.array([3, 5], np.int32), np.array([1, 4], np.int32))
        np.testing.assert_array_equal(keys, expected[0])
        np.testing.assert_array_equal(others, expected[1])
