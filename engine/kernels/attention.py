# mypy: allow-untyped-defs, allow-untyped-calls
"""Attention of new queries over the paged KV cache, causal."""

import numpy as np

from engine.kernels.attention_item import attend, new_scratch
from engine.kernels.attention_plan import SHARED, TABLE, plan_attention
from engine.kernels.attention_rows import add_scaled, clear, copy_scaled
from engine.kernels.jit import borrowed, device, inlined, keep, parallel_kernel, run_team
from engine.kernels.rows import rows_per_task
from engine.kernels.simd import Cache, Float32, Int32, float_bits
from engine.kernels.team import Team, claim, finish, new_counters, wait
from engine.kernels.tree import Tree, causal
from engine.kernels.vector_function import exp2

NUM_ATTENTION_PHASES = 2


@inlined
def _merge_row(plan, row, part_sums, part_stats, out):
    """out[row] from the row's parts, each sum of values weighted for its own maximum."""
    begin, end = plan.part_begin[row], plan.part_begin[row + 1]
    num_heads, dim = out.shape[1:]
    for h in range(num_heads):
        maximum = part_stats[begin, h, 0]
        for part in range(begin + 1, end):
            maximum = max(maximum, part_stats[part, h, 0])
        total = np.float32(0.0)
        target = (row * num_heads + h) * dim
        clear(out, target, dim)
        for part in range(begin, end):
            factor = exp2(part_stats[part, h, 0] - maximum)
            total += part_stats[part, h, 1] * factor
            add_scaled(part_sums, (part * num_heads + h) * dim, factor, out, target, dim)
        copy_scaled(out, target, np.float32(1.0) / total, out, target, dim)


@device
def attention_phases(
    team, phase, q, k_cache, v_cache, block_tables, group_blocks, plan, scale, out, part_sums, part_stats
):
    """`paged_attention_shared` by a plan, shared by the team; part_sums [num_parts, Hq, D], part_stats
    [num_parts, Hq, 2]."""
    own_scratch = new_scratch(k_cache, q.shape[2])
    scratch = borrowed(own_scratch)
    num_kv_heads = k_cache.shape[1]
    num_tasks = plan.items.shape[0] * num_kv_heads
    task = claim(team, phase, num_tasks)
    while task < num_tasks:
        item = plan.items[task // num_kv_heads]
        table = group_blocks[item[TABLE]] if item[SHARED] else block_tables[item[TABLE]]
        head = task % num_kv_heads
        attend(q, k_cache, v_cache, table, plan, item, head, scale, out, part_sums, part_stats, scratch)
        finish(team, phase)
        task = claim(team, phase, num_tasks)
    keep(own_scratch)
    wait(team, phase, num_tasks)
    if part_sums.shape[0] > 0:
        _merge_phase(team, phase + 1, plan, part_sums, part_stats, out)


@inlined
def _merge_phase(team, phase, plan, part_sums, part_stats, out):
    num_rows = out.shape[0]
    size = rows_per_task(num_rows)
    num_tasks = -(-num_rows // size)
    task = claim(team, phase, num_tasks)
    while task < num_tasks:
        for row in range(task * size, min(num_rows, (task + 1) * size)):
            if plan.part_begin[row] < plan.part_begin[row + 1]:
                _merge_row(plan, row, part_sums, part_stats, out)
        finish(team, phase)
        task = claim(team, phase, num_tasks)
    wait(team, phase, num_tasks)


@device
def new_parts(plan, num_heads, dim):
    num_parts = plan.part_begin[plan.part_begin.shape[0] - 1]
    return np.empty((num_parts, num_heads, dim), np.float32), np.empty((num_parts, num_heads, 2), np.float32)


@device
def _attend_team(
    thread, counters, q, k_cache, v_cache, block_tables, group_blocks, plan, scale, out, part_sums, part_stats
):
    attention_phases(
        Team(counters, thread), 0, q, k_cache, v_cache, block_tables, group_blocks, plan, scale, out,
        part_sums, part_stats,
    )  # fmt: skip


@parallel_kernel
def _paged_attention(
    q, k_cache, v_cache, block_tables, cu_query_lens, context_lens, group_of, group_blocks, group_lens, scale,
    out, tree,
):  # fmt: skip
    heads_per_group = q.shape[1] // k_cache.shape[1]
    plan = plan_attention(cu_query_lens, context_lens, group_of, group_lens, tree, heads_per_group)
    sums, stats = new_parts(plan, q.shape[1], q.shape[2])
    counters = new_counters(NUM_ATTENTION_PHASES)
    run_team(
        _attend_team,
        (counters, q, k_cache, v_cache, block_tables, group_blocks, plan, scale, out, sums, stats),
    )


def paged_attention(
    q: Float32, k_cache: Cache, v_cache: Cache, block_tables: Int32, cu_query_lens: Int32,
    context_lens: Int32, scale: float, out: Float32, tree: Tree | None = None,
) -> None:  # fmt: skip
    """Attention of a ragged batch over its pages, causal; with a tree it says who sees whom.

    q, out [T, Hq, D]; k_cache, v_cache [B, Hkv, 16, D]; block_tables [S, max_blocks], cu_query_lens [S + 1],
    context_lens [S].
    Row j of the n rows of sequence s sits at position context_lens[s] - n + j and sees the keys up to there;
    all new keys and values are already in the cache. D is a multiple of 32.
    """
    none = np.empty(0, np.int32)
    paged_attention_shared(
        q, k_cache, v_cache, block_tables, cu_query_lens, context_lens, none, none.reshape(0, 1), none, scale,
        out, tree,
    )  # fmt: skip


def paged_attention_shared(
    q: Float32, k_cache: Cache, v_cache: Cache, block_tables: Int32, cu_query_lens: Int32,
    context_lens: Int32, group_of: Int32, group_blocks: Int32, group_lens: Int32, scale: float, out: Float32,
    tree: Tree | None = None,
) -> None:  # fmt: skip
    """`paged_attention` where groups of sequences begin with the same blocks, which are read once for a
    group.

    group_of [S]: the group of a sequence, -1 for none. group_blocks [G, max_blocks] and group_lens [G] are a
    group's common run of whole blocks and its length in tokens; it ends before the first new row of each
    member. A member's block table begins with the same blocks.
    """
    _paged_attention(
        q, float_bits(k_cache), float_bits(v_cache), block_tables, cu_query_lens, context_lens,
        group_of, group_blocks, group_lens, scale, out, tree or causal(cu_query_lens, context_lens),
    )  # fmt: skip
