"""Rotary embedding of new queries and keys; keys and values go to their slots in the cache."""

import math
from typing import Any

import numpy as np

from engine.kernels.cuda.parameters import Element, Elements, Float, Float32s, Int, Int32s, Kernel
from engine.kernels.cuda.reductions import WARP, warp_sum

PAGE = 16


def rope_write_kv(cuda: Any, primitives: Any, element: Element, head_dim: int, normed: int) -> Kernel:
    """One block a row of qkv [T, (Hq + 2 Hkv) · D], one warp a head; block (32, warps).

    Rotates halves (NeoX). With `normed` every q and k head is RMS-normalised before (Qwen3). Slot -1: the
    row's keys and values are not kept.
    """
    widen, narrow = primitives.CODECS[element]
    sum_in_warp = warp_sum(cuda)
    half = head_dim // 2

    @cuda.jit(device=True, inline="always")
    def norm_scale(qkv: Any, start: Any, lane: Any, eps: Any) -> Any:
        squares = np.float32(0.0)
        for d in range(lane, head_dim, WARP):
            x = widen(qkv[start + d])
            squares += x * x
        return np.float32(1.0) / math.sqrt(sum_in_warp(squares) / np.float32(head_dim) + eps)

    def rope_write_kv(
        qkv: Elements,
        cos: Float32s,
        sin: Float32s,
        positions: Int32s,
        slots: Int32s,
        q_norm: Float32s,
        k_norm: Float32s,
        q_out: Elements,
        k_cache: Elements,
        v_cache: Elements,
        num_heads: Int,
        num_kv_heads: Int,
        eps: Float,
    ) -> None:
        row, lane = cuda.blockIdx.x, cuda.threadIdx.x
        slot, angle = slots[row], positions[row] * half
        for head in range(cuda.threadIdx.y, num_heads + 2 * num_kv_heads, cuda.blockDim.y):
            source = (row * (num_heads + 2 * num_kv_heads) + head) * head_dim
            kv_head = (head - num_heads) % num_kv_heads
            cached = ((slot // PAGE * num_kv_heads + kv_head) * PAGE + slot % PAGE) * head_dim
            if head >= num_heads + num_kv_heads:
                if slot >= 0:
                    for d in range(lane, head_dim, WARP):
                        v_cache[cached + d] = qkv[source + d]
                continue
            scale = np.float32(1.0)
            if normed:
                scale = norm_scale(qkv, source, lane, eps)
            for d in range(lane, half, WARP):
                first, second = widen(qkv[source + d]), widen(qkv[source + half + d])
                if normed and head < num_heads:
                    first *= scale * q_norm[d]
                    second *= scale * q_norm[half + d]
                elif normed:
                    first *= scale * k_norm[d]
                    second *= scale * k_norm[half + d]
                c, s = cos[angle + d], sin[angle + d]
                rotated_first = narrow(first * c - second * s)
                rotated_second = narrow(second * c + first * s)
                if head < num_heads:
                    target = (row * num_heads + head) * head_dim + d
                    q_out[target] = rotated_first
                    q_out[target + half] = rotated_second
                elif slot >= 0:
                    k_cache[cached + d] = rotated_first
                    k_cache[cached + half + d] = rotated_second

    return rope_write_kv
