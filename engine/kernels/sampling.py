"""Sampling on rows: temperature and filters, then the inverse CDF of one uniform in token-id order.

The uniform is keyed by (seed, choice, position), so a seeded output does not depend on the batch, on
preemption or on how many tokens were drafted. Generator: Philox4x32-10, Salmon et al. 2011.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit, prange

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
UInt64 = npt.NDArray[np.uint64]


class DrawParameters(NamedTuple):
    """How each of R rows is drawn."""

    temperature: Float32  # [R]
    top_k: Int32  # [R], 0: all
    top_p: Float32  # [R]
    min_p: Float32  # [R]
    seeds: UInt64  # [R]
    choices: Int64  # [R]
    positions: Int64  # [R]


_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)

# Weights lie in (0, 1]; the upper bits of a float32 order them into this many bins.
_BIN_SHIFT = np.uint32(19)
_NUM_BINS = (0x3F800000 >> 19) + 1


@njit(nogil=True, cache=True)
def philox_uniform(seed: int, choice: int, position: int) -> float:
    """A float64 in [0, 1) with 53 random bits from (uint64 seed, choice, position)."""
    c0, c1 = np.uint64(position) & _LOW, np.uint64(choice) & _LOW
    c2, c3 = np.uint64(0), np.uint64(0)
    k0, k1 = np.uint64(seed) & _LOW, np.uint64(seed) >> _32
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _32) ^ c1 ^ k0, p1 & _LOW, (p0 >> _32) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    high, low = c0 >> np.uint64(5), c1 >> np.uint64(6)
    return (high * 67108864.0 + low) / 9007199254740992.0


@njit(nogil=True, cache=True, parallel=True)
def sample_rows(
    logits: Float32,
    temperature: Float32,
    top_k: Int32,
    top_p: Float32,
    min_p: Float32,
    seeds: UInt64,
    choices: Int64,
    positions: Int64,
    out: Int32,
) -> None:
    """Writes one token id per row.

    logits float32 [R, V], temperature, top_p, min_p float32 [R], top_k int32 [R] (0: all),
    seeds uint64 [R], choices and positions int64 [R], out int32 [R]. Temperature 0 is argmax; the lowest
    id wins ties. Filters apply to the tempered distribution: min_p, then top_k, then top_p.
    """
    for row in prange(logits.shape[0]):
        if temperature[row] == 0.0:
            out[row] = _argmax(logits[row])
        else:
            uniform = philox_uniform(seeds[row], choices[row], positions[row])
            out[row] = _sample(logits[row], temperature[row], top_k[row], top_p[row], min_p[row], uniform)


@njit(nogil=True, cache=True)
def _argmax(values: Float32) -> int:
    # Whole numbers in the order of the floats: their maximum needs no care for NaN, so it is vector code.
    bits = values.view(np.int32)
    highest = np.int32(-0x80000000)
    for i in range(bits.shape[0]):
        highest = max(highest, bits[i] ^ ((bits[i] >> 31) & np.int32(0x7FFFFFFF)))
    for i in range(bits.shape[0]):
        if bits[i] ^ ((bits[i] >> 31) & np.int32(0x7FFFFFFF)) == highest:
            return i
    return 0


@njit(nogil=True, cache=True)
def _sample(
    logits: Float32, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    size = logits.shape[0]
    best: int = _argmax(logits)
    highest = logits[best]
    weights = np.empty(size, np.float32)
    total = 0.0
    for i in range(size):
        weight = np.exp((logits[i] - highest) / temperature)
        weights[i] = weight if weight >= min_p else np.float32(0.0)
        total += weights[i]
    if top_k > 0 or top_p < 1.0:
        total = _filter(weights, total, top_k if top_k > 0 else size, top_p)
    target, cumulative, last = uniform * total, 0.0, best
    for i in range(size):
        if weights[i] > 0.0:
            cumulative += weights[i]
            last = i
            if cumulative > target:
                break
    return last


@njit(nogil=True, cache=True)
def _filter(weights: Float32, total: float, top_k: int, top_p: float) -> float:
    """Zeroes all but the top_k likeliest and, of those, the smallest set that holds top_p of their mass.

    Only the bins that can hold kept tokens are sorted. Answers the mass that is left.
    """
    bits = weights.view(np.uint32)
    counts = np.zeros(_NUM_BINS, np.int64)
    masses = np.zeros(_NUM_BINS)
    for i in range(weights.shape[0]):
        b = bits[i] >> _BIN_SHIFT
        counts[b] += 1
        masses[b] += weights[i]
    lowest, count, mass = _NUM_BINS - 1, counts[_NUM_BINS - 1], masses[_NUM_BINS - 1]
    # With a top_k, top_p is of the mass that the top_k hold, which is not known yet.
    while lowest > 0 and count < top_k and (top_k < weights.shape[0] or mass < top_p * total):
        lowest -= 1
        count += counts[lowest]
        mass += masses[lowest]
    ids = np.empty(count, np.int64)
    at = 0
    for i in range(weights.shape[0]):
        if bits[i] >> _BIN_SHIFT >= lowest:
            ids[at] = i
            at += 1
    order = np.argsort(-weights[ids], kind="mergesort")
    candidates = min(top_k, order.shape[0])
    if candidates < weights.shape[0] and top_k < weights.shape[0]:
        total = 0.0
        for j in range(candidates):
            total += weights[ids[order[j]]]
    kept, left = 0, 0.0
    saved = np.empty(candidates, np.float32)
    while kept < candidates and left < top_p * total:
        saved[kept] = weights[ids[order[kept]]]
        left += saved[kept]
        kept += 1
    weights[:] = 0.0
    for j in range(kept):
        weights[ids[order[j]]] = saved[j]
    return left
