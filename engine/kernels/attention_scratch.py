# mypy: allow-untyped-defs, allow-untyped-calls
"""What a thread works with while a set of query rows meets a run of keys."""

from typing import Any, NamedTuple

from engine.kernels.jit import inlined
from engine.kernels.simd import Float32

KEY_BLOCK = 64  # keys that meet the rows at once


class Scratch(NamedTuple):
    queries: Float32  # [rows, D]
    sums: Float32  # [rows, D] of values, weighted
    scores: Float32  # [rows, KEY_BLOCK], then weights
    maxima: Float32  # [rows] of scores
    totals: Float32  # [rows] of weights
    operands: Any  # the block in the form that it is multiplied in


@inlined
def page_at(cache, table, page, head):
    """Flat index of a KV head's page."""
    _, num_kv_heads, page_size, dim = cache.shape
    return (table[page] * num_kv_heads + head) * page_size * dim
