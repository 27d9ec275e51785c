# mypy: allow-untyped-defs, allow-untyped-calls
"""Matrix products with 8-bit weights and, quantised on the fly, 8-bit activations.

Both sides are scaled in groups of 32 along the depth, which is nearly lossless. A packed weight is an int8
array [num_panels, K / 32, 36 * PANEL]: for each group the numbers [32 / RUN, PANEL outputs, RUN of k], then
the outputs' scales as float32. Processors multiply pairs of 16-bit numbers and add the two products in one
instruction (with VNNI, to a sum as well); a group's sum fits 32 bits with room to spare.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from engine.kernels.jit import device
from engine.kernels.simd import (
    CPU_FEATURES,
    F32,
    HAS_AMX,
    I8,
    I16,
    I32,
    I64,
    LANES,
    Emitter,
    Float32,
    Value,
    spread,
)
from engine.kernels.tile import MAX_TILE_ROWS, PANEL, VECTORS_PER_PANEL
from engine.kernels.vector_function import vector_function

PackedInt8Weight = npt.NDArray[np.int8]

GROUP = 32
_LARGEST = 127.0
# Numbers of an output that lie together: what one instruction multiplies and adds up.
RUN = 4 if HAS_AMX else 2
# Of activations: 8-bit numbers in as many bits as those instructions take.
NUMBER = np.int8 if HAS_AMX else np.int16
GROUP_BYTES = (GROUP + 4) * PANEL


def pack_weight_int8(w: Float32) -> PackedInt8Weight:
    """Quantises and packs w [N, K] float32, K a multiple of 32."""
    num_outputs, depth = w.shape
    if depth % GROUP:
        raise ValueError(f"cannot pack a weight of depth {depth} in groups of {GROUP}")
    num_panels, num_groups = -(-num_outputs // PANEL), depth // GROUP
    padded = np.zeros((num_panels * PANEL, num_groups, GROUP), np.float32)
    padded[:num_outputs] = w.reshape(num_outputs, num_groups, GROUP)
    scales = np.abs(padded).max(-1) / np.float32(_LARGEST)
    numbers = np.rint(padded / np.where(scales == 0, 1, scales)[..., None]).astype(np.int8)
    runs = numbers.reshape(num_panels, PANEL, num_groups, GROUP // RUN, RUN).transpose(0, 2, 3, 1, 4)
    packed = np.empty((num_panels, num_groups, GROUP_BYTES), np.int8)
    packed[..., : GROUP * PANEL] = runs.reshape(num_panels, num_groups, -1)
    by_group = np.ascontiguousarray(scales.reshape(num_panels, PANEL, num_groups).transpose(0, 2, 1))
    packed[..., GROUP * PANEL :] = by_group.view(np.int8)
    return packed


def _emit_quantise(
    emit: Emitter, dtypes: list[Any], x: Value, x_at: Value, num_groups: Value, numbers: Value,
    numbers_at: Value, scales: Value, scales_at: Value,
) -> None:  # fmt: skip
    builder = emit.builder
    x, scales = emit.offset(x, (x_at, 4)), emit.offset(scales, (scales_at, 4))
    number = ir.IntType(dtypes[1].bitwidth)
    size = number.width // 8
    numbers = emit.offset(numbers, (numbers_at, size))
    starts = range(0, GROUP, LANES)
    with emit.loop(num_groups) as group:
        values = [emit.load(emit.offset(x, (group, 4 * GROUP), 4 * at), emit.vector) for at in starts]
        largest = spread(emit.vector, 0.0)
        for value in values:
            largest = emit.maximum(emit.absolute(value), largest)
        top = emit.max_lanes(largest)
        emit.store(builder.fmul(top, F32(1 / _LARGEST)), emit.offset(scales, (group, 4)))
        is_zero = builder.fcmp_ordered("==", top, F32(0.0))
        factor = emit.splat(builder.select(is_zero, F32(0.0), builder.fdiv(F32(_LARGEST), top)))
        for at, value in zip(starts, values, strict=True):
            rounded = builder.fptosi(emit.nearest(builder.fmul(value, factor)), emit.int_vector)
            narrow = builder.trunc(rounded, ir.VectorType(number, LANES))
            emit.store(narrow, emit.offset(numbers, (group, size * GROUP), size * at), align=1)


def _pair_products(emit: Emitter, a: Value, b: Value) -> Value:
    """In each 32-bit lane the sum of the products of its two 16-bit numbers."""
    builder = emit.builder
    shorts = ir.VectorType(I16, 2 * LANES)
    if LANES == 16 and CPU_FEATURES.get("avx512bw"):
        operands = [builder.bitcast(a, shorts), builder.bitcast(b, shorts)]
        return emit.call("llvm.x86.avx512.pmaddw.d.512", emit.int_vector, operands)
    if LANES == 8 and CPU_FEATURES.get("avx2"):
        operands = [builder.bitcast(a, shorts), builder.bitcast(b, shorts)]
        return emit.call("llvm.x86.avx2.pmadd.wd", emit.int_vector, operands)
    half = spread(emit.int_vector, 16)
    low = [builder.ashr(builder.shl(words, half), half) for words in (a, b)]
    high = [builder.ashr(words, half) for words in (a, b)]
    return builder.add(builder.mul(*low), builder.mul(*high))


def _emit_group_sums(
    emit: Emitter, x_rows: list[Value], weights: Value, next_panel: Value
) -> list[list[Value]]:
    """The integer sums [rows][vectors] of one group."""
    builder = emit.builder
    vectors = range(VECTORS_PER_PANEL)
    sums = [[emit.variable(spread(emit.int_vector, 0)) for _ in vectors] for _ in x_rows]
    bytes_of_vector = ir.VectorType(I8, 2 * LANES)
    with emit.loop(I64(GROUP // 2)) as pair:
        # As in the float tile: the next panel comes while this one is worked on.
        emit.prefetch(emit.offset(next_panel, (pair, 2 * PANEL)))
        words = []
        for vector in vectors:
            address = emit.offset(weights, (pair, 2 * PANEL), 2 * LANES * vector)
            shorts = builder.sext(emit.load(address, bytes_of_vector, align=1), ir.VectorType(I16, 2 * LANES))
            words.append(builder.bitcast(shorts, emit.int_vector))
        for x_row, row_sums in zip(x_rows, sums, strict=True):
            x = emit.splat(emit.load(emit.offset(x_row, (pair, 4)), I32))
            for word, variable in zip(words, row_sums, strict=True):
                builder.store(builder.add(builder.load(variable), _pair_products(emit, x, word)), variable)
    return [[builder.load(variable) for variable in row_sums] for row_sums in sums]


def _emit_rows(
    emit: Emitter, num_rows: int, numbers: Value, scales: Value, num_groups: Value, weights: Value,
    out: Value, out_stride: Value,
) -> None:  # fmt: skip
    """The product of num_rows rows and one panel."""
    builder = emit.builder
    vectors = range(VECTORS_PER_PANEL)
    totals = [[emit.variable(spread(emit.vector, 0.0)) for _ in vectors] for _ in range(num_rows)]
    panel_bytes = builder.mul(num_groups, I64(GROUP_BYTES))
    with emit.loop(num_groups) as group:
        rows = [
            emit.offset(numbers, (num_groups, 2 * GROUP * row), (group, 2 * GROUP)) for row in range(num_rows)
        ]
        block = emit.offset(weights, (group, GROUP_BYTES))
        sums = _emit_group_sums(emit, rows, block, emit.offset(block, panel_bytes))
        starts = [emit.offset(block, GROUP * PANEL + 4 * LANES * vector) for vector in vectors]
        weight_scales = [emit.load(start, emit.vector) for start in starts]
        for row in range(num_rows):
            x_scale = emit.splat(emit.load(emit.offset(scales, (num_groups, 4 * row), (group, 4)), F32))
            for weight_scale, total, variable in zip(weight_scales, sums[row], totals[row], strict=True):
                scaled = builder.fmul(builder.sitofp(total, emit.vector), weight_scale)
                builder.store(emit.multiply_add(scaled, x_scale, builder.load(variable)), variable)
    for row in range(num_rows):
        for vector, variable in enumerate(totals[row]):
            emit.store(builder.load(variable), emit.offset(out, (out_stride, 4 * row), 4 * LANES * vector))


def _emit_tiles(
    emit: Emitter, _: list[Any], numbers: Value, scales: Value, row: Value, num_groups: Value, weights: Value,
    panel: Value, out: Value, out_at: Value, out_stride: Value, rows: Value,
) -> None:  # fmt: skip
    """A switch over the number of rows."""
    builder = emit.builder
    numbers = emit.offset(numbers, (builder.mul(row, num_groups), 2 * GROUP))
    scales = emit.offset(scales, (builder.mul(row, num_groups), 4))
    weights = emit.offset(weights, (builder.mul(panel, num_groups), GROUP_BYTES))
    out = emit.offset(out, (out_at, 4))
    for count in emit.cases(rows, range(1, MAX_TILE_ROWS + 1)):
        _emit_rows(emit, count, numbers, scales, num_groups, weights, out, out_stride)


# quantise(x, x_at, num_groups, numbers, numbers_at, scales, scales_at): a row of float32 as numbers of 8 bits
# and a float32 scale for each group.
_quantise = vector_function(_emit_quantise)
_tile = vector_function(_emit_tiles)


@device
def quantise_rows(x, row_begin, row_end, numbers, scales):
    """numbers [rows, K] of dtype NUMBER and scales [rows, K / 32] float32 = x[row_begin:row_end]."""
    depth = x.shape[1]
    num_groups = depth // GROUP
    for row in range(row_end - row_begin):
        _quantise(x, (row_begin + row) * depth, num_groups, numbers, row * depth, scales, row * num_groups)


@device
def multiply_panel_int8(numbers, scales, num_rows, weights, panel, out, out_at, out_stride):
    """out = the quantised rows times one panel; out_at is the flat index of the first result."""
    num_blocks = -(-num_rows // MAX_TILE_ROWS)
    for block in range(num_blocks):
        row = block * num_rows // num_blocks
        rows = (block + 1) * num_rows // num_blocks - row
        target = out_at + row * out_stride
        _tile(numbers, scales, row, weights.shape[1], weights, panel, out, target, out_stride, rows)
