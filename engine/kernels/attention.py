# mypy: allow-untyped-defs, allow-untyped-calls
"""Attention of new queries over the paged KV cache, causal, with a running softmax over blocks of keys.

A few query rows meet the pages as they are; many rows (prefill chunks, large groups over a shared run) first
turn a block of keys into float32 panels, and meet them in the same register tiles as matrix products do. All
query heads of a KV head are rows of one item, so each page is read once for them.
"""

import numpy as np

from engine.kernels.attention_plan import (
    KEY_BEGIN,
    KEY_END,
    MAX_ITEM_ROWS,
    PART,
    ROW_BEGIN,
    ROW_END,
    SHARED,
    TABLE,
    plan_attention,
)
from engine.kernels.attention_rows import add_scaled, clear, copy_scaled, softmax_row
from engine.kernels.attention_tiles import PAGE, ROW_BLOCK, page_scores, page_values, transpose_page
from engine.kernels.jit import device, inlined, parallel_kernel, run_team
from engine.kernels.rows import rows_per_task
from engine.kernels.simd import Cache, Float32, Int32, exp2, float_bits
from engine.kernels.team import claim, claim_next, new_team, wait
from engine.kernels.tile import MAX_TILE_ROWS, PANEL, multiply_rows

NUM_ATTENTION_PHASES = 2
_LOG2_E = np.float32(1.4426950408889634)
_KEY_BLOCK = 64
_FEW_ROWS = 12  # up to which widening the pages into panels does not pay


@inlined
def _new_scratch(dim):
    """A thread's working memory: queries, sums of values, scores, panels of keys, rows of values, maxima,
    sums of weights."""
    queries = np.empty((MAX_ITEM_ROWS, dim), np.float32)
    sums = np.empty((MAX_ITEM_ROWS, dim), np.float32)
    scores = np.empty((MAX_ITEM_ROWS, _KEY_BLOCK), np.float32)
    keys = np.empty((_KEY_BLOCK, dim), np.float32)
    values = np.empty((_KEY_BLOCK, dim), np.float32)
    maxima = np.empty(MAX_ITEM_ROWS, np.float32)
    totals = np.empty(MAX_ITEM_ROWS, np.float32)
    return queries, sums, scores, keys, values, maxima, totals


@inlined
def _start_rows(q, row_order, item, head, heads, scale, scratch):
    """Gathers the item's queries, scaled for base 2, and clears their sums. Returns the number of rows x
    heads."""
    queries, sums, _, _, _, maxima, totals = scratch
    dim = q.shape[2]
    count = 0
    for place in range(item[ROW_BEGIN], item[ROW_END]):
        row = row_order[place]
        for index in range(heads):
            source = (row * q.shape[1] + head * heads + index) * dim
            copy_scaled(q, source, scale * _LOG2_E, queries, count * dim, dim)
            clear(sums, count * dim, dim)
            maxima[count] = -np.inf
            totals[count] = np.float32(0.0)
            count += 1
    return count


@inlined
def _page_at(cache, table, page, head):
    """Flat index of a KV head's page."""
    _, num_kv_heads, page_size, dim = cache.shape
    return (table[page] * num_kv_heads + head) * page_size * dim


@inlined
def _score_few(scratch, num_rows, k_cache, table, first_page, num_pages, last_page, head):
    queries, _, scores = scratch[:3]
    dim = k_cache.shape[3]
    for page in range(first_page, first_page + num_pages):
        at, next_at = (
            _page_at(k_cache, table, page, head),
            _page_at(k_cache, table, min(page + 1, last_page), head),
        )
        for row in range(0, num_rows, ROW_BLOCK):
            rows = min(ROW_BLOCK, num_rows - row)
            target = row * _KEY_BLOCK + (page - first_page) * PAGE
            page_scores(queries, row * dim, dim, k_cache, at, next_at, dim, scores, target, _KEY_BLOCK, rows)


@inlined
def _score_many(scratch, num_rows, k_cache, table, first_page, num_pages, head):
    queries, _, scores, keys = scratch[:4]
    dim = k_cache.shape[3]
    for page in range(num_pages):
        at = _page_at(k_cache, table, first_page + page, head)
        target = page * PAGE // PANEL * dim * PANEL + page * PAGE % PANEL
        transpose_page(k_cache, at, dim, keys, target, PANEL)
    for row in range(0, num_rows, MAX_TILE_ROWS):
        rows = min(MAX_TILE_ROWS, num_rows - row)
        for panel in range(-(-num_pages * PAGE // PANEL)):
            w_panel = (panel * dim * PANEL, PANEL, dim * PANEL)
            target = (row * _KEY_BLOCK + panel * PANEL, _KEY_BLOCK)
            multiply_rows(queries, (row * dim, dim), rows, keys, w_panel, dim, scores, target, 1, 0)


@inlined
def _add_values_few(scratch, num_rows, v_cache, table, first_page, num_keys, last_page, head):
    _, sums, scores = scratch[:3]
    dim = v_cache.shape[3]
    for key in range(0, num_keys, PAGE):
        page = first_page + key // PAGE
        at, next_at = (
            _page_at(v_cache, table, page, head),
            _page_at(v_cache, table, min(page + 1, last_page), head),
        )
        count = min(PAGE, num_keys - key)
        for row in range(0, num_rows, ROW_BLOCK):
            rows = min(ROW_BLOCK, num_rows - row)
            source = row * _KEY_BLOCK + key
            page_values(
                scores, source, _KEY_BLOCK, v_cache, at, next_at, count, dim, sums, row * dim, dim, rows
            )


@inlined
def _add_values_many(scratch, num_rows, v_cache, table, first_page, num_keys, head):
    _, sums, scores, _, values = scratch[:5]
    dim = v_cache.shape[3]
    for key in range(0, num_keys, PAGE):
        at = _page_at(v_cache, table, first_page + key // PAGE, head)
        copy_scaled(v_cache, at, np.float32(1.0), values, key * dim, min(PAGE, num_keys - key) * dim)
    for row in range(0, num_rows, MAX_TILE_ROWS):
        rows = min(MAX_TILE_ROWS, num_rows - row)
        weights = (row * _KEY_BLOCK, _KEY_BLOCK)
        for column in range(0, dim, PANEL):
            target = (row * dim + column, dim)
            multiply_rows(scores, weights, rows, values, (column, dim, PANEL), num_keys, sums, target, 1, 1)


@inlined
def _softmax_block(scratch, plan, item, heads, key, num_keys):
    _, sums, scores, _, _, maxima, totals = scratch
    dim = sums.shape[1]
    count = 0
    for place in range(item[ROW_BEGIN], item[ROW_END]):
        visible = min(num_keys, plan.num_visible[plan.row_order[place]] - key)
        for _ in range(heads):
            softmax_row(
                scores, count * _KEY_BLOCK, visible, num_keys, maxima, totals, count, sums, count * dim, dim
            )
            count += 1


@inlined
def _finish_rows(scratch, plan, item, head, heads, out, part_sums, part_stats):
    """The item's results go to `out`, or to its part of each row."""
    _, sums, _, _, _, maxima, totals = scratch
    dim = sums.shape[1]
    count = 0
    for place in range(item[ROW_BEGIN], item[ROW_END]):
        row = plan.row_order[place]
        part = plan.part_begin[row]
        alone = part == plan.part_begin[row + 1]
        part += item[PART]
        for h in range(head * heads, (head + 1) * heads):
            if alone:
                factor = np.float32(1.0) / totals[count]
                copy_scaled(sums, count * dim, factor, out, (row * out.shape[1] + h) * dim, dim)
            else:
                part_stats[part, h, 0] = maxima[count]
                part_stats[part, h, 1] = totals[count]
                target = (part * out.shape[1] + h) * dim
                copy_scaled(sums, count * dim, np.float32(1.0), part_sums, target, dim)
            count += 1


@inlined
def _attend(q, k_cache, v_cache, table, plan, item, head, scale, out, part_sums, part_stats, scratch):
    """One item for one KV head; `table` holds its blocks."""
    heads = q.shape[1] // k_cache.shape[1]
    num_rows = _start_rows(q, plan.row_order, item, head, heads, scale, scratch)
    last_page = (item[KEY_END] - 1) // PAGE
    for key in range(item[KEY_BEGIN], item[KEY_END], _KEY_BLOCK):
        num_keys = min(_KEY_BLOCK, item[KEY_END] - key)
        first_page, num_pages = key // PAGE, -(-num_keys // PAGE)
        if num_rows <= _FEW_ROWS:
            _score_few(scratch, num_rows, k_cache, table, first_page, num_pages, last_page, head)
            _softmax_block(scratch, plan, item, heads, key, num_keys)
            _add_values_few(scratch, num_rows, v_cache, table, first_page, num_keys, last_page, head)
        else:
            _score_many(scratch, num_rows, k_cache, table, first_page, num_pages, head)
            _softmax_block(scratch, plan, item, heads, key, num_keys)
            _add_values_many(scratch, num_rows, v_cache, table, first_page, num_keys, head)
    _finish_rows(scratch, plan, item, head, heads, out, part_sums, part_stats)


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
    scratch = _new_scratch(q.shape[2])
    num_kv_heads = k_cache.shape[1]
    num_tasks = plan.items.shape[0] * num_kv_heads
    task = claim(team, phase)
    while task < num_tasks:
        item = plan.items[task // num_kv_heads]
        table = group_blocks[item[TABLE]] if item[SHARED] else block_tables[item[TABLE]]
        head = task % num_kv_heads
        _attend(q, k_cache, v_cache, table, plan, item, head, scale, out, part_sums, part_stats, scratch)
        task = claim_next(team, phase)
    wait(team, phase, num_tasks)
    if part_sums.shape[0] > 0:
        _merge_phase(team, phase + 1, plan, part_sums, part_stats, out)


@inlined
def _merge_phase(team, phase, plan, part_sums, part_stats, out):
    num_rows = out.shape[0]
    size = rows_per_task(num_rows)
    num_tasks = -(-num_rows // size)
    task = claim(team, phase)
    while task < num_tasks:
        for row in range(task * size, min(num_rows, (task + 1) * size)):
            if plan.part_begin[row] < plan.part_begin[row + 1]:
                _merge_row(plan, row, part_sums, part_stats, out)
        task = claim_next(team, phase)
    wait(team, phase, num_tasks)


@device
def new_parts(plan, num_heads, dim):
    num_parts = plan.part_begin[plan.part_begin.shape[0] - 1]
    return np.empty((num_parts, num_heads, dim), np.float32), np.empty((num_parts, num_heads, 2), np.float32)


@parallel_kernel
def _paged_attention(
    q,
    k_cache,
    v_cache,
    block_tables,
    cu_query_lens,
    context_lens,
    group_of,
    group_blocks,
    group_lens,
    scale,
    out,
):
    team = new_team(NUM_ATTENTION_PHASES)
    plan = plan_attention(cu_query_lens, context_lens, group_of, group_lens, q.shape[1] // k_cache.shape[1])
    sums, stats = new_parts(plan, q.shape[1], q.shape[2])
    run_team(
        attention_phases,
        (team, 0, q, k_cache, v_cache, block_tables, group_blocks, plan, scale, out, sums, stats),
    )


def paged_attention(
    q: Float32, k_cache: Cache, v_cache: Cache, block_tables: Int32, cu_query_lens: Int32,
    context_lens: Int32, scale: float, out: Float32,
) -> None:  # fmt: skip
    """Attention of a ragged batch over its pages, causal.

    q, out [T, Hq, D]; k_cache, v_cache [B, Hkv, 16, D]; block_tables [S, max_blocks], cu_query_lens [S + 1],
    context_lens [S].
    Row j of the n rows of sequence s sits at position context_lens[s] - n + j and sees the keys up to there;
    all new keys and values are already in the cache. D is a multiple of 32.
    """
    none = np.empty(0, np.int32)
    paged_attention_shared(
        q,
        k_cache,
        v_cache,
        block_tables,
        cu_query_lens,
        context_lens,
        none,
        none.reshape(0, 1),
        none,
        scale,
        out,
    )


def paged_attention_shared(
    q: Float32, k_cache: Cache, v_cache: Cache, block_tables: Int32, cu_query_lens: Int32,
    context_lens: Int32, group_of: Int32, group_blocks: Int32, group_lens: Int32, scale: float, out: Float32,
) -> None:  # fmt: skip
    """`paged_attention` where groups of sequences begin with the same blocks, which are read once for a
    group.

    group_of [S]: the group of a sequence, -1 for none. group_blocks [G, max_blocks] and group_lens [G] are a
    group's common run of whole blocks and its length in tokens; it ends before the first new row of each
    member. A member's block table begins with the same blocks.
    """
    _paged_attention(
        q, float_bits(k_cache), float_bits(v_cache), block_tables, cu_query_lens, context_lens,
        group_of, group_blocks, group_lens, scale, out,
    )  # fmt: skip
