# mypy: allow-untyped-defs, allow-untyped-calls
"""A block of bfloat16 keys and values meets query rows in pairs of numbers: two neighbours of a key's row,
then the weights of two neighbouring keys."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.kernels.amx import SIDE
from engine.kernels.attention_scratch import KEY_BLOCK, page_at
from engine.kernels.attention_tiles import PAGE, prefetch_page, transpose_pairs
from engine.kernels.jit import inlined
from engine.kernels.pairs import multiply_pairs, narrow, pair_rows
from engine.kernels.tile import PANEL

Words = npt.NDArray[np.uint32]


class PairOperands(NamedTuple):
    queries: Words  # [rows, D / 2]
    keys: Words  # [KEY_BLOCK, D / 2] words, in panels
    values: Words  # [KEY_BLOCK / 2, D]
    weights: Words  # [rows, KEY_BLOCK / 2]


@inlined
def new_pair_operands(num_rows, dim):
    return PairOperands(
        np.empty((num_rows, dim // 2), np.uint32),
        np.empty((KEY_BLOCK, dim // 2), np.uint32),
        np.empty((KEY_BLOCK // 2, dim), np.uint32),
        np.empty((num_rows, KEY_BLOCK // 2), np.uint32),
    )


@inlined
def narrow_queries(scratch, num_rows):
    queries = scratch.queries
    narrow(queries, 0, scratch.operands.queries, 0, num_rows * queries.shape[1])


@inlined
def score_pairs(scratch, num_rows, k_cache, table, key, num_keys, last_page, head):
    queries, keys = scratch.operands.queries, scratch.operands.keys
    words = k_cache.shape[3] // 2
    first_page, num_pages = key // PAGE, -(-num_keys // PAGE)
    for page in range(num_pages):
        next_page = min(first_page + page + 1, last_page)
        prefetch_page(k_cache, page_at(k_cache, table, next_page, head), 2 * words)
        at = page_at(k_cache, table, first_page + page, head)
        target = page * PAGE // PANEL * words * PANEL + page * PAGE % PANEL
        transpose_pairs(k_cache, at, words, keys, target, PANEL)
    panels = -(-num_pages * PAGE // PANEL)
    w_panel = (0, PANEL, words * PANEL)
    target = (0, KEY_BLOCK)
    multiply_pairs(queries, (0, words), num_rows, keys, w_panel, words, scratch.scores, target, panels, 0)


@inlined
def add_pair_values(scratch, num_rows, v_cache, table, key, num_keys, last_page, head):
    values, weights = scratch.operands.values, scratch.operands.weights
    dim = v_cache.shape[3]
    first_page = key // PAGE
    for done in range(0, num_keys, PAGE):
        page = first_page + done // PAGE
        prefetch_page(v_cache, page_at(v_cache, table, min(page + 1, last_page), head), dim)
        at = page_at(v_cache, table, page, head)
        pair_rows(v_cache, at, min(PAGE, num_keys - done), dim, values, done // 2 * dim)
    # The depth is filled up with zeros: what lies in a page's unused slots may be anything.
    num_pairs = -(-num_keys // 2)
    depth = -(-num_pairs // SIDE) * SIDE
    values[num_pairs:depth] = 0
    used = -(-num_keys // PAGE) * PAGE
    for row in range(num_rows):
        narrow(scratch.scores, row * KEY_BLOCK, weights, row * KEY_BLOCK // 2, used)
        weights[row, used // 2 : depth] = 0
    w_panel, target = (0, dim, PANEL), (0, dim)
    x_row = (0, KEY_BLOCK // 2)
    panels = dim // PANEL
    multiply_pairs(weights, x_row, num_rows, values, w_panel, depth, scratch.sums, target, panels, 1)
