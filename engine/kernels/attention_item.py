# mypy: allow-untyped-defs, allow-untyped-calls
"""Attention of one item of the plan for one KV head: a set of query rows meets a run of keys.

Blocks of keys go through a running softmax. A few query rows meet the pages as they are; many rows (prefill
chunks, large groups over a shared run) first turn a block of keys into float32 panels, and meet them in the
same register tiles as matrix products do. All query heads of the KV head are rows of the item, so each page
is read once for them.
"""

from typing import NamedTuple

import numpy as np

from engine.kernels.attention_plan import KEY_BEGIN, KEY_END, MAX_ITEM_ROWS, PART, ROW_BEGIN, ROW_END
from engine.kernels.attention_rows import clear, copy_scaled, softmax_row
from engine.kernels.attention_tiles import PAGE, ROW_BLOCK, page_scores, page_values, transpose_page
from engine.kernels.jit import inlined
from engine.kernels.simd import Float32
from engine.kernels.tile import MAX_TILE_ROWS, PANEL, multiply_rows

_LOG2_E = np.float32(1.4426950408889634)
_KEY_BLOCK = 64
_FEW_ROWS = 12  # up to which widening the pages into panels does not pay


class Scratch(NamedTuple):
    """A thread's working memory."""

    queries: Float32  # [rows, D]
    sums: Float32  # [rows, D] of values, weighted
    scores: Float32  # [rows, _KEY_BLOCK], then weights
    keys: Float32  # [_KEY_BLOCK, D] numbers, in panels
    values: Float32  # [_KEY_BLOCK, D]
    maxima: Float32  # [rows] of scores
    totals: Float32  # [rows] of weights


@inlined
def new_scratch(dim):
    return Scratch(
        np.empty((MAX_ITEM_ROWS, dim), np.float32),
        np.empty((MAX_ITEM_ROWS, dim), np.float32),
        np.empty((MAX_ITEM_ROWS, _KEY_BLOCK), np.float32),
        np.empty((_KEY_BLOCK, dim), np.float32),
        np.empty((_KEY_BLOCK, dim), np.float32),
        np.empty(MAX_ITEM_ROWS, np.float32),
        np.empty(MAX_ITEM_ROWS, np.float32),
    )


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
def _page_at(cache, table, page, head):
    """Flat index of a KV head's page."""
    _, num_kv_heads, page_size, dim = cache.shape
    return (table[page] * num_kv_heads + head) * page_size * dim


@inlined
def _score_few(scratch, num_rows, k_cache, table, first_page, num_pages, last_page, head):
    queries, scores = scratch.queries, scratch.scores
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
    queries, scores, keys = scratch.queries, scratch.scores, scratch.keys
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
    sums, scores = scratch.sums, scratch.scores
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
    sums, scores, values = scratch.sums, scratch.scores, scratch.values
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
    sums, scores, maxima, totals = scratch.sums, scratch.scores, scratch.maxima, scratch.totals
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
