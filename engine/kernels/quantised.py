# mypy: allow-untyped-defs, allow-untyped-calls
"""Weights of 4 or 8 bits, scaled in groups of 32 along the depth, and rows quantised on the fly.

A packed weight is an array [num_panels, K / 32, size of a group], whose dtype says what it holds, and to how
many bits rows are quantised that it is multiplied with:

    int8, int16    numbers from -127 to 127: weight = scale * number; rows of 8, 16 bits
    uint8, uint16  numbers from 0 to 15: weight = scale * number + minimum, as GGUF's Q4_1 has them; the same

A group begins with the numbers of its PANEL outputs in runs of 4 along the depth, [8 runs, PANEL, 4]; where
they have 4 bits, the upper four runs are in the high halves of the lower four's bytes. Behind them are the
outputs' scales [PANEL] as float32, or scales and minima [2, PANEL] as float16.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types

from engine.kernels.jit import by_type, inlined
from engine.kernels.simd import CPU_FEATURES, F16, F32, I8, LANES, Emitter, Float32, Value, like, spread
from engine.kernels.tile import PANEL, VECTORS_PER_PANEL
from engine.kernels.vector_function import vector_function

PackedInt8Weight = npt.NDArray[np.int8] | npt.NDArray[np.int16]
PackedInt4Weight = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]

GROUP = 32
RUN = 4  # numbers of an output that lie together: what one instruction multiplies and adds up
NUM_RUNS = GROUP // RUN
Q4_BLOCK_BYTES = 2 + 2 + GROUP // 2  # scale, minimum, numbers
_LARGEST = np.float32(127.0)
_VECTORS = range(VECTORS_PER_PANEL)
# Processors that add up four products of bytes (VNNI) are slower with 16-bit numbers than with both halves of
# them: a group of a row then holds the upper bytes, then the lower ones.
HAS_VNNI = all(map(CPU_FEATURES.get, ("avx512vnni", "avx512vl"))) or (
    LANES == 8 and bool(CPU_FEATURES.get("avxvnni"))
)


class Format(NamedTuple):
    """How a group of a panel is stored."""

    bits: int
    row_bits: int

    @property
    def splits_rows(self) -> bool:
        return HAS_VNNI and self.row_bits == 16

    @property
    def scales_at(self) -> int:
        return GROUP * PANEL * self.bits // 8

    @property
    def group_bytes(self) -> int:
        return self.scales_at + 4 * PANEL

    def scales(self, emit: Emitter, group: Value) -> list[tuple[Value, Value]]:
        """(scale, minimum) of the outputs in each vector of a panel; numbers of 8 bits are raised by 128."""
        address = emit.offset(group, self.scales_at)
        if self.bits == 8:
            scales = [emit.load(emit.offset(address, 4 * LANES * v), emit.vector) for v in _VECTORS]
            return [(scale, emit.builder.fmul(scale, spread(emit.vector, -128.0))) for scale in scales]
        halves = like(emit.vector, F16)
        scales, minima = (
            [
                emit.builder.fpext(emit.load(emit.offset(address, 2 * at), halves, align=2), emit.vector)
                for at in range(first, first + PANEL, LANES)
            ]
            for first in (0, PANEL)
        )
        return list(zip(scales, minima, strict=True))


_FORMATS = {
    types.int8: Format(8, row_bits=8),
    types.uint8: Format(4, row_bits=8),
    types.int16: Format(8, row_bits=16),
    types.uint16: Format(4, row_bits=16),
}


def format_of(dtype: types.Type) -> Format:
    """Of a packed weight with this numba dtype."""
    return _FORMATS[dtype]


def is_quantised(dtype: types.Type) -> bool:
    return dtype in _FORMATS


def pack_weight_int8(w: Float32, row_bits: int = 8) -> PackedInt8Weight:
    """Quantises and packs w [N, K] float32, K a multiple of 32."""
    num_outputs, depth = w.shape
    if depth % GROUP:
        raise ValueError(f"cannot pack a weight of depth {depth} in groups of {GROUP}")
    num_panels, num_groups = -(-num_outputs // PANEL), depth // GROUP
    padded = np.zeros((num_panels * PANEL, num_groups, GROUP), np.float32)
    padded[:num_outputs] = w.reshape(num_outputs, num_groups, GROUP)
    scales = np.abs(padded).max(-1) / _LARGEST
    numbers = np.rint(padded / np.where(scales == 0, 1, scales)[..., None]).astype(np.int8)
    packed = _pack(numbers, scales[..., None])
    return packed if row_bits == 8 else packed.view(np.int16)


def pack_weight_int4(blocks: npt.NDArray[np.uint8], row_bits: int = 8) -> PackedInt4Weight:
    """Packs w [N, K / 32 * 20] of GGUF's Q4_1 blocks: scale and minimum as float16, then 16 bytes, whose low
    halves are the first 16 numbers and whose high halves are the others."""
    num_outputs, row_bytes = blocks.shape
    num_panels, num_groups = -(-num_outputs // PANEL), row_bytes // Q4_BLOCK_BYTES
    padded = np.zeros((num_panels * PANEL, num_groups, Q4_BLOCK_BYTES), np.uint8)
    padded[:num_outputs] = blocks.reshape(num_outputs, num_groups, Q4_BLOCK_BYTES)
    packed = _pack(padded[..., 4:], np.ascontiguousarray(padded[..., :4]).view(np.float16))
    return packed if row_bits == 8 else packed.view(np.uint16)


def _pack(numbers: npt.NDArray[Any], scales: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """numbers [outputs, groups, bytes of numbers], scales [outputs, groups, 1 or 2], whole panels."""
    num_outputs, num_groups, num_bytes = numbers.shape
    num_panels = num_outputs // PANEL
    runs = numbers.reshape(num_panels, PANEL, num_groups, num_bytes // RUN, RUN).transpose(0, 2, 3, 1, 4)
    behind = scales.reshape(num_panels, PANEL, num_groups, -1).transpose(0, 2, 3, 1)
    packed = np.empty((num_panels, num_groups, (num_bytes + 4) * PANEL), numbers.dtype)
    packed[..., : num_bytes * PANEL] = runs.reshape(num_panels, num_groups, -1)
    packed[..., num_bytes * PANEL :] = (
        np.ascontiguousarray(behind).view(numbers.dtype).reshape(num_panels, num_groups, -1)
    )
    return packed


class QuantisedRows(NamedTuple):
    numbers: npt.NDArray[np.int8] | npt.NDArray[np.int16]  # [rows, K]; a run of 16 bits: 0, 2, 1, 3
    scales: Float32  # [rows, K / 32]
    sums: Float32  # [rows, K / 32], of the numbers, scaled


@by_type
def _new_numbers(num_rows, depth, weights):
    dtype = np.int8 if format_of(weights.dtype).row_bits == 8 else np.int16
    return lambda num_rows, depth, weights: np.empty((num_rows, depth), dtype)


@inlined
def new_quantised_rows(num_rows, depth, weights):
    num_groups = depth // GROUP
    return QuantisedRows(
        _new_numbers(num_rows, depth, weights),
        np.empty((num_rows, num_groups), np.float32),
        np.empty((num_rows, num_groups), np.float32),
    )


def _emit_quantise(
    emit: Emitter, dtypes: list[Any], x: Value, x_at: Value, num_groups: Value, row: Value, numbers: Value,
    scales: Value, sums: Value,
) -> None:  # fmt: skip
    builder, number = emit.builder, ir.IntType(dtypes[1].bitwidth)
    size = number.width // 8
    first = builder.mul(row, num_groups)
    x, numbers = emit.offset(x, (x_at, 4)), emit.offset(numbers, (first, size * GROUP))
    scales, sums = emit.offset(scales, (first, 4)), emit.offset(sums, (first, 4))
    starts = range(0, GROUP, LANES)
    split = HAS_VNNI and size == 2
    most = 127.0 * 256 + 127 if split else float((1 << number.width - 1) - 1)
    bytes_of_vector = ir.VectorType(I8, LANES)
    in_order = [
        run + lane for run in range(0, LANES, RUN) for lane in ((0, 2, 1, 3) if size == 2 else range(RUN))
    ]
    with emit.loop(num_groups) as group:
        values = [emit.load(emit.offset(x, (group, 4 * GROUP), 4 * at), emit.vector) for at in starts]
        largest = spread(emit.vector, 0.0)
        for value in values:
            largest = emit.maximum(emit.absolute(value), largest)
        top = emit.max_lanes(largest)
        scale = builder.fmul(top, F32(1 / most))
        is_zero = builder.fcmp_ordered("==", top, F32(0.0))
        factor = emit.splat(builder.select(is_zero, F32(0.0), builder.fdiv(F32(most), top)))
        total = spread(emit.vector, 0.0)
        for at, value in zip(starts, values, strict=True):
            whole = emit.nearest(builder.fmul(value, factor))
            total = builder.fadd(total, whole)
            whole = builder.fptosi(whole, emit.int_vector)
            target = emit.offset(numbers, (group, size * GROUP), at if split else size * at)
            if split:
                upper = builder.add(whole, spread(emit.int_vector, 128))
                upper = builder.ashr(upper, spread(emit.int_vector, 8))
                emit.store(builder.trunc(upper, bytes_of_vector), target, align=1)
                emit.store(builder.trunc(whole, bytes_of_vector), emit.offset(target, GROUP), align=1)
                continue
            narrow = builder.trunc(whole, ir.VectorType(number, LANES))
            emit.store(emit.shuffle(narrow, narrow, in_order), target, align=1)
        emit.store(scale, emit.offset(scales, (group, 4)))
        emit.store(builder.fmul(scale, emit.sum_lanes(total)), emit.offset(sums, (group, 4)))


# quantise(x, x_at, num_groups, row, numbers, scales, sums): a row.
_quantise = vector_function(_emit_quantise)


@inlined
def quantise_rows(x, row_begin, row_end, rows):
    """rows = x[row_begin:row_end]"""
    depth = x.shape[1]
    for row in range(row_end - row_begin):
        at = (row_begin + row) * depth
        _quantise(x, at, depth // GROUP, row, rows.numbers, rows.scales, rows.sums)
