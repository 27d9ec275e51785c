# mypy: allow-untyped-defs, allow-untyped-calls
"""Attention of one item of the plan for one KV head: a set of query rows meets a run of keys.

Blocks of keys go through a running softmax. All query heads of the KV head are rows of the item, so each page
is read once for them.
"""

import numpy as np

from engine.kernels.attention_floats import add_float_values, new_float_operands, score_floats
from engine.kernels.attention_pairs import add_pair_values, narrow_queries, new_pair_operands, score_pairs
from engine.kernels.attention_plan import KEY_BEGIN, KEY_END, MAX_ITEM_ROWS, PART, ROW_BEGIN, ROW_END
from engine.kernels.attention_rows import SOFTMAX_ROWS, clear, copy_scaled, softmax_rows
from engine.kernels.attention_scratch import KEY_BLOCK, Scratch
from engine.kernels.attention_tiles import PAGE
from engine.kernels.jit import by_type, inlined
from engine.kernels.pairs import multiplies_pairs

_LOG2_E = np.float32(1.4426950408889634)


@inlined
def new_scratch(cache, dim):
    return Scratch(
        np.empty((MAX_ITEM_ROWS, dim), np.float32),
        np.empty((MAX_ITEM_ROWS, dim), np.float32),
        np.empty((MAX_ITEM_ROWS, KEY_BLOCK), np.float32),
        np.empty(MAX_ITEM_ROWS, np.float32),
        np.empty(MAX_ITEM_ROWS, np.float32),
        _new_operands(cache, dim),
    )


@by_type
def _new_operands(cache, dim):
    if multiplies_pairs(cache.dtype):
        return lambda cache, dim: new_pair_operands(MAX_ITEM_ROWS, dim)
    return lambda cache, dim: new_float_operands(dim)


@by_type
def _prepare_queries(cache, scratch, num_rows):
    if multiplies_pairs(cache.dtype):
        return lambda cache, scratch, num_rows: narrow_queries(scratch, num_rows)
    return lambda cache, scratch, num_rows: None


@by_type
def _score(scratch, num_rows, cache, table, key, num_keys, last_page, head):
    """scores = queries · a block of keys."""
    return _for_cache(cache, score_pairs, score_floats)


@by_type
def _add_values(scratch, num_rows, cache, table, key, num_keys, last_page, head):
    """sums += weights · a block of values."""
    return _for_cache(cache, add_pair_values, add_float_values)


def _for_cache(cache, of_pairs, of_floats):
    chosen = of_pairs if multiplies_pairs(cache.dtype) else of_floats

    def run(scratch, num_rows, cache, table, key, num_keys, last_page, head):
        chosen(scratch, num_rows, cache, table, key, num_keys, last_page, head)

    return run


@inlined
def _start_rows(q, row_order, item, head, heads, scale, scratch):
    """Gathers the item's queries, scaled for base 2, and clears their sums. Returns the number of rows x
    heads."""
    queries, sums, maxima, totals = scratch.queries, scratch.sums, scratch.maxima, scratch.totals
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
def _hide_strangers(scores, count, visible, num_keys, ancestors):
    """Of the keys from `visible` on a tree's row keeps those whose bit in `ancestors` is set."""
    for index in range(max(visible, 0), num_keys):
        if (ancestors >> (index - visible)) & 1 == 0:
            scores[count, index] = -np.inf


@inlined
def _softmax_block(scratch, plan, item, heads, key, num_keys):
    sums, scores, maxima, totals = scratch.sums, scratch.scores, scratch.maxima, scratch.totals
    dim = sums.shape[1]
    count = 0
    for place in range(item[ROW_BEGIN], item[ROW_END]):
        row = plan.row_order[place]
        visible = max(0, min(num_keys, plan.num_visible[row] - key))
        ancestors = plan.ancestors[row]
        if ancestors != 0:
            for index in range(count, count + heads):
                _hide_strangers(scores, index, plan.num_visible[row] - key, num_keys, ancestors)
            visible = num_keys
        for first in range(count, count + heads, SOFTMAX_ROWS):
            rows = min(SOFTMAX_ROWS, count + heads - first)
            softmax_rows(scores, first, KEY_BLOCK, visible, num_keys, maxima, totals, sums, dim, rows)
        count += heads


@inlined
def _finish_rows(scratch, plan, item, head, heads, out, part_sums, part_stats):
    """The item's results go to `out`, or to its part of each row."""
    sums, maxima, totals = scratch.sums, scratch.maxima, scratch.totals
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
def attend(q, k_cache, v_cache, table, plan, item, head, scale, out, part_sums, part_stats, scratch):
    """One item for one KV head; `table` holds its blocks."""
    heads = q.shape[1] // k_cache.shape[1]
    num_rows = _start_rows(q, plan.row_order, item, head, heads, scale, scratch)
    _prepare_queries(k_cache, scratch, num_rows)
    last_page = (item[KEY_END] - 1) // PAGE
    for key in range(item[KEY_BEGIN], item[KEY_END], KEY_BLOCK):
        num_keys = min(KEY_BLOCK, item[KEY_END] - key)
        _score(scratch, num_rows, k_cache, table, key, num_keys, last_page, head)
        _softmax_block(scratch, plan, item, heads, key, num_keys)
        _add_values(scratch, num_rows, v_cache, table, key, num_keys, last_page, head)
    _finish_rows(scratch, plan, item, head, heads, out, part_sums, part_stats)
