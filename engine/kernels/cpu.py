"""The engine's kernels on a CPU: numba, float32 accumulation, every call releases the GIL."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Cache = npt.NDArray[np.float32] | npt.NDArray[np.uint16] | npt.NDArray[np.float16]

PAGE = 16


class PackedWeight(NamedTuple):
    data: npt.NDArray[np.float32]


class PackedInt8Weight(NamedTuple):
    data: npt.NDArray[np.int8]
    scales: Float32


def pack_weight(w: npt.NDArray[np.uint16]) -> PackedWeight:
    return PackedWeight((w.astype(np.uint32) << 16).view(np.float32))


def matmul(x: Float32, w: PackedWeight, out: Float32) -> None:
    np.matmul(x, w.data.T, out=out)


def pack_weight_int8(w: Float32) -> PackedInt8Weight:
    n, k = w.shape
    groups = w.reshape(n, k // 32, 32)
    scales = np.maximum(np.abs(groups).max(-1), 1e-30) / 127
    return PackedInt8Weight(np.rint(groups / scales[..., None]).astype(np.int8).reshape(n, k), scales)


def matmul_int8(x: Float32, w: PackedInt8Weight, out: Float32) -> None:
    n, k = w.data.shape
    m = x.shape[0]
    xg = x.reshape(m, k // 32, 32)
    xs = np.maximum(np.abs(xg).max(-1), 1e-30) / 127
    xq = np.rint(xg / xs[..., None]) * xs[..., None]
    wf = w.data.reshape(n, k // 32, 32) * w.scales[..., None]
    np.matmul(xq.reshape(m, k), wf.reshape(n, k).T, out=out)


@njit(nogil=True, cache=True)
def rms_norm(x, weight, eps, out):
    for t in range(x.shape[0]):
        total = np.float32(0.0)
        for h in range(x.shape[1]):
            total += x[t, h] * x[t, h]
        scale = np.float32(1.0 / np.sqrt(total / x.shape[1] + eps))
        for h in range(x.shape[1]):
            out[t, h] = x[t, h] * scale * weight[h]


@njit(nogil=True, cache=True)
def add_rms_norm(residual, delta, weight, eps, out):
    for t in range(residual.shape[0]):
        for h in range(residual.shape[1]):
            residual[t, h] += delta[t, h]
    rms_norm(residual, weight, eps, out)


@njit(nogil=True, cache=True)
def _rope_write_kv(qkv, cos, sin, positions, slot_mapping, q_out, k_out, v_out):
    num_q, dim = q_out.shape[1], q_out.shape[2]
    num_kv = k_out.shape[1]
    half = dim // 2
    for t in range(qkv.shape[0]):
        p = positions[t]
        for h in range(num_q + num_kv):
            for d in range(half):
                a, b = qkv[t, h * dim + d], qkv[t, h * dim + half + d]
                c, s = cos[p, d], sin[p, d]
                if h < num_q:
                    q_out[t, h, d] = a * c - b * s
                    q_out[t, h, half + d] = b * c + a * s
                else:
                    k_out[t, h - num_q, d] = a * c - b * s
                    k_out[t, h - num_q, half + d] = b * c + a * s
        for h in range(num_kv):
            for d in range(dim):
                v_out[t, h, d] = qkv[t, (num_q + num_kv + h) * dim + d]


def _to_cache(values: Float32, dtype: np.dtype) -> npt.NDArray:
    if dtype == np.uint16:
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(dtype)


def _widen(values: npt.NDArray) -> Float32:
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def rope_write_kv(qkv, cos, sin, positions, slot_mapping, q_out, k_cache, v_cache):
    t, _, dim = q_out.shape
    k = np.empty((t, k_cache.shape[1], dim), np.float32)
    v = np.empty_like(k)
    _rope_write_kv(qkv, cos, sin, positions, slot_mapping, q_out, k, v)
    rows = np.flatnonzero(slot_mapping >= 0)
    slots = slot_mapping[rows]
    k_cache[slots // PAGE, :, slots % PAGE] = _to_cache(k[rows], k_cache.dtype)
    v_cache[slots // PAGE, :, slots % PAGE] = _to_cache(v[rows], v_cache.dtype)


@njit(nogil=True, cache=True)
def silu_mul(gate_up, out):
    n = out.shape[1]
    for t in range(out.shape[0]):
        for i in range(n):
            g = gate_up[t, i]
            out[t, i] = g / (np.float32(1.0) + np.exp(-g)) * gate_up[t, n + i]


def gather_blocks(cache, blocks, out):
    pages = _widen(cache[blocks])  # [n, Hkv, 16, D]
    out[:] = pages.transpose(1, 0, 2, 3).reshape(out.shape)


def paged_attention(q, k_cache, v_cache, block_tables, cu_query_lens, context_lens, scale, out):
    num_kv, dim = k_cache.shape[1], k_cache.shape[3]
    group = q.shape[1] // num_kv
    for s in range(len(context_lens)):
        lo, hi, length = cu_query_lens[s], cu_query_lens[s + 1], int(context_lens[s])
        num_rows = hi - lo
        if num_rows == 0:
            continue
        blocks = block_tables[s, : -(-length // PAGE)]
        k = np.empty((num_kv, len(blocks) * PAGE, dim), np.float32)
        v = np.empty_like(k)
        gather_blocks(k_cache, blocks, k)
        gather_blocks(v_cache, blocks, v)
        k, v = k[:, :length], v[:, :length]
        rows = q[lo:hi].reshape(num_rows, num_kv, group, dim).transpose(1, 2, 0, 3)
        scores = rows @ k[:, None].transpose(0, 1, 3, 2) * np.float32(scale)
        visible = np.arange(length) <= (length - num_rows + np.arange(num_rows))[:, None]
        scores = np.where(visible, scores, np.float32(-np.inf))
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        out[lo:hi] = (p @ v[:, None]).transpose(2, 0, 1, 3).reshape(num_rows, num_kv * group, dim)


def paged_attention_shared(
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
    """group_of i32[S] (-1: none), group_blocks i32[G, maxB], group_lens i32[G] in tokens (whole blocks).

    block_tables of a member still holds its shared blocks first."""
    paged_attention(q, k_cache, v_cache, block_tables, cu_query_lens, context_lens, scale, out)


def copy_blocks(k_cache, v_cache, src, dst):
    k_cache[dst] = k_cache[src]
    v_cache[dst] = v_cache[src]


@njit(nogil=True, cache=True)
def verify_drafts(drafts, targets, num_drafts, accepted, next_token):
    for b in range(drafts.shape[0]):
        n = 0
        while n < num_drafts[b] and drafts[b, n] == targets[b, n]:
            n += 1
        accepted[b] = n
        next_token[b] = targets[b, n]
