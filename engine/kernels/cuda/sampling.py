"""Sampling on rows of logits: temperature and filters, then the inverse CDF of one uniform in token-id order.

The rule of `engine.kernels.sampling`, one block a row. Weights exp((logit - highest) / temperature) are
counted in units of 2^-40, so sums are integers: the same in every order, hence in every batch. What the
filters keep is said by a threshold: all tokens of greater weight and, of those with that very weight, the
first ones by id.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numba.cuda import types

from engine.kernels.cuda.parameters import Element, Float32s, Int, Int32s, Int64s, Kernel, UInt64s
from engine.kernels.cuda.reductions import ALL_LANES, WARP, warp_sum
from engine.kernels.sampling import philox_uniform

MASS_UNITS = np.float32(2.0**40)
WEIGHT_BITS = 30  # weights lie in [0, 1]; seen as integers they are below 2^30
PIVOT_BITS = 3  # of the threshold that one pass over the row finds
NUM_PIVOTS = 2**PIVOT_BITS - 1
NUM_PARTS = 32
NUM_SHARED = NUM_PIVOTS * WARP
MINUS_INFINITY = np.float32(-np.inf)


class Row(NamedTuple):
    """A row of logits and what turns them into weights."""

    logits: Any
    start: Any
    width: Any
    highest: Any
    inverse_temperature: Any
    min_p: Any


class _Search(NamedTuple):
    find_highest: Any
    find_threshold: Any
    sums_above: Any
    find_token: Any


def _weights(cuda: Any) -> tuple[Any, Any]:
    @cuda.jit(device=True, inline="always")
    def weight_of(row: Any, i: Any) -> Any:
        weight = math.exp((row.logits[row.start + i] - row.highest) * row.inverse_temperature)
        return weight if weight >= row.min_p else np.float32(0.0)

    @cuda.jit(device=True, inline="always")
    def mass_of(weight: Any) -> Any:
        return np.int64(weight * MASS_UNITS)

    return weight_of, mass_of


def _search(cuda: Any, primitives: Any) -> _Search:
    """What a block finds in a row of logits; every thread learns it. `shared` is int64 [NUM_PIVOTS · 32]."""
    sum_in_warp = warp_sum(cuda)
    weight_of, mass_of = _weights(cuda)

    @cuda.jit(device=True, inline="always")
    def find_highest(logits: Any, start: Any, width: Any, values: Any, ids: Any) -> Any:
        """The id of the highest logit, the lowest id of several. values float32, ids int32: shared [32]."""
        best, at = MINUS_INFINITY, width
        for i in range(cuda.threadIdx.x, width, cuda.blockDim.x):
            if logits[start + i] > best:
                best, at = logits[start + i], i
        for step in (16, 8, 4, 2, 1):
            other, other_at = (
                cuda.shfl_xor_sync(ALL_LANES, best, step),
                cuda.shfl_xor_sync(ALL_LANES, at, step),
            )
            if other > best or (other == best and other_at < at):
                best, at = other, other_at
        if cuda.threadIdx.x % WARP == 0:
            values[cuda.threadIdx.x // WARP], ids[cuda.threadIdx.x // WARP] = best, at
        cuda.syncthreads()
        best, at = values[0], ids[0]
        for warp in range(1, cuda.blockDim.x // WARP):
            if values[warp] > best or (values[warp] == best and ids[warp] < at):
                best, at = values[warp], ids[warp]
        return min(at, width - 1)

    @cuda.jit(device=True, inline="always")
    def find_threshold(
        row: Any,
        count: Any,
        target: Any,
        shared: Any,
    ) -> Any:
        """The greatest weight such that the tokens of at least that weight are, or weigh, `target` or more.

        `count`: whether the target is a number of tokens or a mass.
        """
        lane, warp, num_warps = cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP, cuda.blockDim.x // WARP
        found = 0
        for step in range(WEIGHT_BITS // PIVOT_BITS):
            shift = WEIGHT_BITS - PIVOT_BITS * (step + 1)
            sums = cuda.local.array(NUM_PIVOTS, types.int64)
            for pivot in range(NUM_PIVOTS):
                sums[pivot] = 0
            for i in range(cuda.threadIdx.x, row.width, cuda.blockDim.x):
                weight = weight_of(row, i)
                amount = 1 if count else mass_of(weight)
                for pivot in range(NUM_PIVOTS):
                    bits = np.int32(found + ((pivot + 1) << shift))
                    if weight >= primitives.float_of_bits(bits):
                        sums[pivot] += amount
            for pivot in range(NUM_PIVOTS):
                in_warp = sum_in_warp(sums[pivot])
                if lane == 0:
                    shared[pivot * WARP + warp] = in_warp
            cuda.syncthreads()
            reached = 0
            for pivot in range(NUM_PIVOTS):
                if sum_in_warp(shared[pivot * WARP + lane] if lane < num_warps else 0) >= target:
                    reached = pivot + 1
            cuda.syncthreads()
            found += reached << shift
        return primitives.float_of_bits(np.int32(found))

    @cuda.jit(device=True, inline="always")
    def sums_above(
        row: Any,
        threshold: Any,
        shared: Any,
    ) -> Any:
        """Number and mass of the tokens whose weight is above the threshold."""
        lane, warp, num_warps = cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP, cuda.blockDim.x // WARP
        number, mass = 0, 0
        for i in range(cuda.threadIdx.x, row.width, cuda.blockDim.x):
            weight = weight_of(row, i)
            if weight > threshold:
                number += 1
                mass += mass_of(weight)
        number, mass = sum_in_warp(number), sum_in_warp(mass)
        if lane == 0:
            shared[warp], shared[WARP + warp] = number, mass
        cuda.syncthreads()
        number = sum_in_warp(shared[lane] if lane < num_warps else 0)
        mass = sum_in_warp(shared[WARP + lane] if lane < num_warps else 0)
        cuda.syncthreads()
        return number, mass

    @cuda.jit(device=True, inline="always")
    def find_token(
        row: Any,
        threshold: Any,
        kept_ties: Any,
        target: Any,
        shared: Any,
    ) -> Any:
        """The first id at which the mass of what is kept exceeds the target, which is below the whole."""
        lane, warp, num_warps = cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP, cuda.blockDim.x // WARP
        tie_mass = mass_of(threshold)
        low, high, above, ties = 0, row.width, 0, 0
        while high - low > WARP:
            span = (high - low + NUM_PARTS - 1) // NUM_PARTS
            for part in range(warp, NUM_PARTS, num_warps):
                mass, number = 0, 0
                for i in range(low + part * span + lane, min(high, low + (part + 1) * span), WARP):
                    weight = weight_of(row, i)
                    if weight > threshold:
                        mass += mass_of(weight)
                    elif weight == threshold:
                        number += 1
                mass, number = sum_in_warp(mass), sum_in_warp(number)
                if lane == 0:
                    shared[part], shared[NUM_PARTS + part] = mass, number
            cuda.syncthreads()
            part = 0
            mass, number = above + shared[0], ties + shared[NUM_PARTS]
            while mass + min(number, kept_ties) * tie_mass <= target and part < NUM_PARTS - 1:
                above, ties = mass, number
                part += 1
                mass, number = above + shared[part], ties + shared[NUM_PARTS + part]
            cuda.syncthreads()
            low, high = low + part * span, min(high, low + (part + 1) * span)
        token = low
        for i in range(low, high):
            weight = weight_of(row, i)
            if weight > threshold:
                above += mass_of(weight)
            elif weight == threshold:
                ties += 1
            if above + min(ties, kept_ties) * tie_mass > target:
                token = i
                break
        return token

    return _Search(find_highest, find_threshold, sums_above, find_token)


def sample_rows(cuda: Any, primitives: Any, element: Element) -> Kernel:
    """One block a row of logits float32 [R, V]; parameters as in `engine.kernels.sampling`."""
    find_highest, find_threshold, sums_above, find_token = _search(cuda, primitives)
    _, mass_of = _weights(cuda)
    uniform_of = cuda.jit(device=True, inline="always")(philox_uniform.py_func)

    def sample_rows(
        logits: Float32s,
        temperature: Float32s,
        top_k: Int32s,
        top_p: Float32s,
        min_p: Float32s,
        seeds: UInt64s,
        choices: Int64s,
        positions: Int64s,
        out: Int32s,
        width: Int,
    ) -> None:
        values = cuda.shared.array(WARP, types.float32)
        ids = cuda.shared.array(WARP, types.int32)
        shared = cuda.shared.array(NUM_SHARED, types.int64)
        at = cuda.blockIdx.x
        start = at * width
        best = find_highest(logits, start, width, values, ids)
        if temperature[at] == 0:
            if cuda.threadIdx.x == 0:
                out[at] = best
            return
        row = Row(logits, start, width, logits[start + best], np.float32(1.0) / temperature[at], min_p[at])
        threshold, kept_ties = np.float32(0.0), 0
        number, total = sums_above(row, threshold, shared)
        for step in range(2):
            by_count = step == 0
            if by_count:
                wanted, filters = top_k[at], 0 < top_k[at] < number
            else:
                wanted, filters = math.ceil(np.float64(top_p[at]) * total), top_p[at] < 1
            if filters:
                wanted = max(wanted, 1)
                threshold = find_threshold(row, by_count, wanted, shared)
                number, mass = sums_above(row, threshold, shared)
                tie_mass = mass_of(threshold)
                if by_count:
                    kept_ties = wanted - number
                else:
                    kept_ties = (wanted - mass + tie_mass - 1) // tie_mass
                total = mass + kept_ties * tie_mass
        uniform = uniform_of(seeds[at], choices[at], positions[at])
        target = min(int(uniform * total), total - 1)
        token = find_token(row, threshold, kept_ties, target, shared)
        if cuda.threadIdx.x == 0:
            out[at] = token

    return sample_rows
