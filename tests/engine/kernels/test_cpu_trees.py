"""Trees of drafts on a CPU against plain references: attention, acceptance, and moving what was accepted."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.gpu_check import references
from engine.kernels import cpu
from tests.engine.kernels.reference import (
    PAGE,
    assert_close,
    attention,
    attention_problem,
    from_cache,
    to_cache,
)


def random_tree(contexts: list[tuple[int, int]], with_tree: list[bool], seed: int) -> cpu.Tree:
    """The rows of each chosen context are its last token and the nodes of a random tree."""
    rng = random.Random(seed)
    cu_query_lens = np.cumsum([0] + [rows for _, rows in contexts], dtype=np.int32)
    tree = cpu.causal(cu_query_lens, np.array([length for length, _ in contexts], np.int32))
    for s, ((length, num_rows), chosen) in enumerate(zip(contexts, with_tree, strict=True)):
        if not chosen:
            continue
        masks = [0]
        for node in range(num_rows - 1):
            masks.append(rng.choice(masks) | 1 << node)
        rows = slice(cu_query_lens[s] + 1, cu_query_lens[s + 1])
        tree.visible[rows] = length - num_rows + 1
        tree.ancestors[rows] = masks[1:]
    return tree


TREES = [(2, 2), (18, 17), (40, 9), (64, 16), (262, 12), (530, 20), (1030, 33)]
MIXED = [(40, 1), (300, 8), (900, 200), (17, 17), (520, 16), (33, 1), (80, 33)]
IN_MIXED = [False, True, False, False, True, False, True]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (9, 3), (8, 1)])
@pytest.mark.parametrize(
    ("contexts", "with_tree"), [(TREES, [True] * 7), (MIXED, IN_MIXED)], ids=["trees", "mixed"]
)
def test_attention(
    contexts: list[tuple[int, int]], with_tree: list[bool], num_heads: int, num_kv_heads: int, dtype: str
) -> None:
    p = attention_problem(contexts, num_heads, num_kv_heads, 64, dtype)
    tree = random_tree(contexts, with_tree, seed=num_heads)
    out = np.full_like(p.q, np.nan)
    cpu.paged_attention(
        p.q, p.k_cache, p.v_cache, p.block_tables, p.cu_query_lens, p.context_lens, p.scale, out, tree
    )
    assert_close(out, p, tree)
    assert np.abs(out - attention(p)).max() > 0.1, "the tree hides something"


def test_attention_of_a_group_whose_members_draft_trees() -> None:
    contexts, num_shared = [(300 + 5 * i, 1 + 3 * i) for i in range(6)], 12
    p = attention_problem(contexts, 9, 3, 64, "bfloat16")
    tables = p.block_tables.copy()
    tables[:, :num_shared] = tables[0, :num_shared]
    p = replace(p, block_tables=tables)
    tree = random_tree(contexts, [True] * 6, seed=4)
    out = np.full_like(p.q, np.nan)
    cpu.paged_attention_shared(
        p.q, p.k_cache, p.v_cache, p.block_tables, p.cu_query_lens, p.context_lens, np.zeros(6, np.int32),
        tables[:1, :num_shared].copy(), np.array([num_shared * PAGE], np.int32), p.scale, out, tree,
    )  # fmt: skip
    assert_close(out, p, tree)


def test_a_chain_is_a_tree_with_one_branch() -> None:
    contexts = [(530, 17), (40, 5)]
    p = attention_problem(contexts, 9, 3, 64, "float32")
    tree = cpu.causal(p.cu_query_lens, p.context_lens)
    for first, (length, num_rows) in zip(p.cu_query_lens, contexts, strict=False):
        for node in range(num_rows - 1):
            tree.visible[first + 1 + node] = length - num_rows + 1
            tree.ancestors[first + 1 + node] = (2 << node) - 1
    plain, masked = np.empty_like(p.q), np.empty_like(p.q)
    arguments = p.q, p.k_cache, p.v_cache, p.block_tables, p.cu_query_lens, p.context_lens, p.scale
    cpu.paged_attention(*arguments, plain)
    cpu.paged_attention(*arguments, masked, tree)
    np.testing.assert_array_equal(masked, plain)


@st.composite
def verified_trees(draw: st.DrawFn) -> list[tuple[list[int], list[int], list[int]]]:
    """Tokens, parents and targets of the nodes, node 0 included."""
    trees = []
    for _ in range(draw(st.integers(0, 5))):
        size, token = draw(st.integers(1, 9)), st.integers(0, 2)
        tokens, targets = (draw(st.lists(token, min_size=size, max_size=size)) for _ in range(2))
        trees.append((tokens, [-1] + [draw(st.integers(0, node)) for node in range(size - 1)], targets))
    return trees


@settings(deadline=None)  # the first call compiles
@given(verified_trees())
def test_verify_tree(trees: list[tuple[list[int], list[int], list[int]]]) -> None:
    shape = len(trees), max((len(tokens) for tokens, _, _ in trees), default=1)
    arrays = np.full((3, *shape), 1, np.int32)
    for row, parts in enumerate(trees):
        for array, part in zip(arrays, parts, strict=True):
            array[row, : len(part)] = part
    accepted, following = np.full((2, len(trees)), -1, np.int32)
    path = np.full(shape, -1, np.int32)
    num_nodes = np.array([len(tokens) for tokens, _, _ in trees], np.int32)
    tokens, parents, targets = arrays
    cpu.verify_tree(tokens, parents, num_nodes, targets, accepted, path, following)
    for row, parts in enumerate(trees):
        nodes, token = references.verify_tree(*parts)
        assert path[row, : accepted[row]].tolist() == nodes
        assert following[row] == token


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_compact_kv(dtype: str) -> None:
    """Slot 20 is a target after it has been a source; slots go from block to block."""
    values = torch.randn(3, 6, 2, PAGE, 64, generator=torch.Generator().manual_seed(0))
    keys, others = to_cache(values, dtype).copy(), to_cache(values * 2, dtype).copy()
    src, dst = [20, 33, 35, 90], [17, 20, 31, 4]
    expected = []
    for cache in (keys, others):
        slots = from_cache(cache).transpose(2, 3).flatten(1, 2).clone()  # [L, slots, Hkv, D]
        for source, target in zip(src, dst, strict=True):
            slots[:, target] = slots[:, source]
        expected.append(slots.view(3, 6, PAGE, 2, 64).transpose(2, 3))
    cpu.compact_kv(keys, others, np.array(src, np.int32), np.array(dst, np.int32))
    for cache, wanted in zip((keys, others), expected, strict=True):
        torch.testing.assert_close(from_cache(cache), wanted, rtol=0, atol=0)
