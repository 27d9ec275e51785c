"""Paged attention in the simulator against plain torch."""

import numpy as np
import pytest
import torch

from engine.gpu_check.problems import Problem, problem
from engine.gpu_check.references import causal
from engine.kernels.cuda.kernels import CudaKernels
from engine.kernels.cuda.plan import SharedPrefix, Tuning
from engine.kernels.tree import Tree
from tests.engine.cuda.simulator import SimulatorLauncher

# One warp a block, and splits of one page.
SMALL = Tuning(page_warps=1, row_warps=1, min_split_tokens=16, max_splits=4, num_blocks=8)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
DTYPES = list(TOLERANCE)


def kernels(tuning: Tuning = SMALL) -> CudaKernels:
    return CudaKernels(SimulatorLauncher(), tuning)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_decode_with_every_head_size(dtype: torch.dtype, head_dim: int) -> None:
    p = problem(dtype, [1], [29], head_dim=head_dim)
    assert_close(p.answer(kernels()), p.expected(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 4, 8])
def test_decode_with_every_group_and_several_kv_heads(dtype: torch.dtype, group: int) -> None:
    p = problem(dtype, [1, 1], [17, 16], group=group, num_kv_heads=2)
    assert_close(p.answer(kernels()), p.expected(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 4])
def test_a_draft_is_verified_like_a_decode(dtype: torch.dtype, splits: int) -> None:
    p = problem(dtype, [3, 1, 5], [30, 1, 21], group=2)
    assert_close(p.answer(kernels(SMALL._replace(max_splits=splits))), p.expected(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 3])
def test_prefill_chunks_beside_a_decode(dtype: torch.dtype, splits: int) -> None:
    p = problem(dtype, [1, 7, 12], [20, 7, 30])
    assert_close(p.answer(kernels(SMALL._replace(max_splits=splits))), p.expected(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_warps_share_the_pages_of_a_decode_and_the_rows_of_a_chunk(dtype: torch.dtype) -> None:
    p = problem(dtype, [1, 20], [70, 37], group=4)
    wide = Tuning(page_warps=4, row_warps=4, min_split_tokens=64, num_blocks=4)
    assert_close(p.answer(kernels(wide)), p.expected(), dtype)


def test_a_maximum_far_above_the_rest_of_the_context_counts_alone() -> None:
    p = problem(torch.float32, [1], [30])
    p.k_cache[p.block_tables[0][1], 0, 5] = 100 * p.q[0, 0]
    assert_close(p.answer(kernels()), p.expected(), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tree_nodes_see_their_ancestors_only(dtype: torch.dtype) -> None:
    prefix = 14
    parents = [-1, 0, 0, 1, 1, 3]
    ancestors = np.zeros(len(parents), np.int64)
    for node, parent in enumerate(parents):
        ancestors[node] = (ancestors[parent] if parent >= 0 else 0) | 1 << node
    p = problem(dtype, [len(parents), 2], [prefix + len(parents), 9], group=4)
    tree = Tree(
        visible=np.array([prefix] * len(parents) + [8, 9], np.int32),
        ancestors=np.concatenate([ancestors, np.zeros(2, np.int64)]),
    )
    nodes = torch.tensor([[bool(mask >> node & 1) for node in range(len(parents))] for mask in ancestors])
    sees = torch.cat([torch.ones(len(parents), prefix, dtype=torch.bool), nodes], 1)
    assert_close(p.answer(kernels(), tree), p.expected([sees, causal(2, 9)]), dtype)


def shared_problem(dtype: torch.dtype, query_lens: list[int], context_lens: list[int]) -> Problem:
    return problem(dtype, query_lens, context_lens, group=2, num_shared_blocks=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 2])
def test_a_shared_prefix_is_met_once_and_merged_with_the_tails(dtype: torch.dtype, splits: int) -> None:
    p = shared_problem(dtype, [1, 1, 3, 1], [40, 33, 46, 35])
    prefixes = [SharedPrefix((0, 2, 3), 32)]
    tuning = SMALL._replace(max_splits=splits)
    assert_close(p.answer(kernels(tuning), prefixes=prefixes), p.expected(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_share_a_prefix_than_fit_one_tile(dtype: torch.dtype) -> None:
    num_sequences = 11
    p = shared_problem(dtype, [1] * num_sequences, [33 + s % 3 for s in range(num_sequences)])
    prefixes = [SharedPrefix(tuple(range(num_sequences)), 32)]
    assert_close(p.answer(kernels(), prefixes=prefixes), p.expected(), dtype)
