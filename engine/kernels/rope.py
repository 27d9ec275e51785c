# mypy: allow-untyped-defs, allow-untyped-calls
"""Rotary embedding of new queries and keys; keys and values go to their slots in the cache."""

import numpy as np

from engine.kernels.jit import borrowed, device, keep, kernel
from engine.kernels.rows import rows_per_task
from engine.kernels.simd import Cache, Float32, Int32, float_bits
from engine.kernels.team import alone, claim, finish, wait
from engine.kernels.vector_function import store_float


@device
def _prepare_head(source, row, column, bias, norm, eps, head):
    """head [D] = one head of a row of qkv, with bias and norm where the model has them (empty where not)."""
    dim = head.shape[0]
    for index in range(dim):
        head[index] = source[row, column + index]
    if bias.shape[0] > 0:
        for index in range(dim):
            head[index] += bias[column + index]
    if norm.shape[0] > 0:
        squares = np.float32(0.0)
        for index in range(dim):
            squares += head[index] * head[index]
        scale = np.float32(1.0) / np.sqrt(squares / np.float32(dim) + np.float32(eps))
        for index in range(dim):
            head[index] *= scale * norm[index]


@device
def _rotate(head, cos, sin, position):
    half = head.shape[0] // 2
    for index in range(half):
        first, second = head[index], head[half + index]
        head[index] = first * cos[position, index] - second * sin[position, index]
        head[half + index] = second * cos[position, index] + first * sin[position, index]


@device
def _write(cache, slot, kv_head, head):
    num_kv_heads, page, dim = cache.shape[1:]
    start = ((slot // page * num_kv_heads + kv_head) * page + slot % page) * dim
    for index in range(dim):
        store_float(cache, start + index, head[index])


@device
def _rope_row(row, qkv, bias, q_norm, k_norm, eps, cos, sin, position, slot, q_out, k_cache, v_cache, head):
    num_heads, dim = q_out.shape[1:]
    num_kv_heads = k_cache.shape[1]
    for index in range(num_heads):
        _prepare_head(qkv, row, index * dim, bias, q_norm, eps, head)
        _rotate(head, cos, sin, position)
        for d in range(dim):
            q_out[row, index, d] = head[d]
    if slot < 0:
        return
    for index in range(num_kv_heads):
        _prepare_head(qkv, row, (num_heads + index) * dim, bias, k_norm, eps, head)
        _rotate(head, cos, sin, position)
        _write(k_cache, slot, index, head)
        _prepare_head(qkv, row, (num_heads + num_kv_heads + index) * dim, bias, k_norm[:0], eps, head)
        _write(v_cache, slot, index, head)


@device
def rope_phase(
    team, phase, qkv, bias, q_norm, k_norm, eps, cos, sin, positions, slot_mapping, q_out, k_cache, v_cache
):
    """`rope_write_kv` with the bias [(Hq + 2Hkv)·D] of Qwen2 and the norms [D] of Qwen3, each empty where
    absent."""
    num_rows = qkv.shape[0]
    size = rows_per_task(num_rows)
    num_tasks = -(-num_rows // size)
    own_head = np.empty(q_out.shape[2], np.float32)
    head = borrowed(own_head)
    task = claim(team, phase, num_tasks)
    while task < num_tasks:
        for row in range(task * size, min(num_rows, (task + 1) * size)):
            position, slot = positions[row], slot_mapping[row]
            _rope_row(
                row, qkv, bias, q_norm, k_norm, eps, cos, sin, position, slot, q_out, k_cache, v_cache, head
            )
        finish(team, phase)
        task = claim(team, phase, num_tasks)
    keep(own_head)
    wait(team, phase, num_tasks)


@kernel
def _rope_write_kv(qkv, cos, sin, positions, slot_mapping, q_out, k_cache, v_cache):
    none = np.empty(0, np.float32)
    rope_phase(
        alone(), 0, qkv, none, none, none, 0.0, cos, sin, positions, slot_mapping, q_out, k_cache, v_cache
    )


def rope_write_kv(
    qkv: Float32, cos: Float32, sin: Float32, positions: Int32, slot_mapping: Int32, q_out: Float32,
    k_cache: Cache, v_cache: Cache,
) -> None:  # fmt: skip
    """Rotates (NeoX: halves) the queries and keys in the rows of qkv [T, (Hq + 2Hkv)·D], and scatters keys
    and values.

    cos, sin [P, D/2]; positions, slot_mapping [T] (slot -1: nothing is written); q_out [T, Hq, D]; k_cache,
    v_cache [B, Hkv, 16, D], rounded to nearest even.
    """
    k_cache, v_cache = float_bits(k_cache), float_bits(v_cache)
    _rope_write_kv(qkv, cos, sin, positions, slot_mapping, q_out, k_cache, v_cache)
