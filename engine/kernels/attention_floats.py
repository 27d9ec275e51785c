# mypy: allow-untyped-defs, allow-untyped-calls
"""A block of keys and values meets query rows in float32.

A few rows meet the pages as they are; many rows (prefill chunks, large groups over a shared run) first turn
the block into float32 panels, and meet them in the same register tiles as matrix products do.
"""

from typing import NamedTuple

import numpy as np

from engine.kernels.attention_rows import copy_scaled
from engine.kernels.attention_scratch import KEY_BLOCK, page_at
from engine.kernels.attention_tiles import PAGE, ROW_BLOCK, page_scores, page_values, transpose_page
from engine.kernels.jit import inlined
from engine.kernels.simd import Float32
from engine.kernels.tile import PANEL, multiply_rows

_FEW_ROWS = 12  # up to which widening the pages into panels does not pay


class FloatOperands(NamedTuple):
    keys: Float32  # [KEY_BLOCK, D] numbers, in panels
    values: Float32  # [KEY_BLOCK, D]


@inlined
def new_float_operands(dim):
    return FloatOperands(np.empty((KEY_BLOCK, dim), np.float32), np.empty((KEY_BLOCK, dim), np.float32))


@inlined
def score_floats(scratch, num_rows, k_cache, table, key, num_keys, last_page, head):
    if num_rows <= _FEW_ROWS:
        _score_few(scratch, num_rows, k_cache, table, key // PAGE, -(-num_keys // PAGE), last_page, head)
    else:
        _score_many(scratch, num_rows, k_cache, table, key // PAGE, -(-num_keys // PAGE), head)


@inlined
def add_float_values(scratch, num_rows, v_cache, table, key, num_keys, last_page, head):
    if num_rows <= _FEW_ROWS:
        _add_values_few(scratch, num_rows, v_cache, table, key // PAGE, num_keys, last_page, head)
    else:
        _add_values_many(scratch, num_rows, v_cache, table, key // PAGE, num_keys, head)


@inlined
def _score_few(scratch, num_rows, k_cache, table, first_page, num_pages, last_page, head):
    queries, scores = scratch.queries, scratch.scores
    dim = k_cache.shape[3]
    for page in range(first_page, first_page + num_pages):
        at, next_at = (
            page_at(k_cache, table, page, head),
            page_at(k_cache, table, min(page + 1, last_page), head),
        )
        for row in range(0, num_rows, ROW_BLOCK):
            rows = min(ROW_BLOCK, num_rows - row)
            target = row * KEY_BLOCK + (page - first_page) * PAGE
            page_scores(queries, row * dim, dim, k_cache, at, next_at, dim, scores, target, KEY_BLOCK, rows)


@inlined
def _score_many(scratch, num_rows, k_cache, table, first_page, num_pages, head):
    keys = scratch.operands.keys
    dim = k_cache.shape[3]
    for page in range(num_pages):
        at = page_at(k_cache, table, first_page + page, head)
        target = page * PAGE // PANEL * dim * PANEL + page * PAGE % PANEL
        transpose_page(k_cache, at, dim, keys, target, PANEL)
    for panel in range(-(-num_pages * PAGE // PANEL)):
        w_panel = (panel * dim * PANEL, PANEL, dim * PANEL)
        target = (panel * PANEL, KEY_BLOCK)
        multiply_rows(scratch.queries, (0, dim), num_rows, keys, w_panel, dim, scratch.scores, target, 1, 0)


@inlined
def _add_values_few(scratch, num_rows, v_cache, table, first_page, num_keys, last_page, head):
    sums, scores = scratch.sums, scratch.scores
    dim = v_cache.shape[3]
    for key in range(0, num_keys, PAGE):
        page = first_page + key // PAGE
        at, next_at = (
            page_at(v_cache, table, page, head),
            page_at(v_cache, table, min(page + 1, last_page), head),
        )
        count = min(PAGE, num_keys - key)
        for row in range(0, num_rows, ROW_BLOCK):
            rows = min(ROW_BLOCK, num_rows - row)
            source = row * KEY_BLOCK + key
            page_values(
                scores, source, KEY_BLOCK, v_cache, at, next_at, count, dim, sums, row * dim, dim, rows
            )


@inlined
def _add_values_many(scratch, num_rows, v_cache, table, first_page, num_keys, head):
    values = scratch.operands.values
    dim = v_cache.shape[3]
    for key in range(0, num_keys, PAGE):
        at = page_at(v_cache, table, first_page + key // PAGE, head)
        copy_scaled(v_cache, at, np.float32(1.0), values, key * dim, min(PAGE, num_keys - key) * dim)
    weights = (0, KEY_BLOCK)
    for column in range(0, dim, PANEL):
        w_panel, target = (column, dim, PANEL), (column, dim)
        multiply_rows(
            scratch.scores, weights, num_rows, values, w_panel, num_keys, scratch.sums, target, 1, 1
        )
