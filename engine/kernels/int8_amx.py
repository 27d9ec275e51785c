# mypy: allow-untyped-defs, allow-untyped-calls
"""Products of 8-bit numbers, scaled in groups, in the processor's matrix registers.

A group's sums are whole numbers: they leave the registers, are scaled by both sides' scales and added up in
float32, while the registers work on the next group.
"""

from typing import Any

from llvmlite import ir

from engine.kernels.amx import SIDE, Registers
from engine.kernels.jit import inlined
from engine.kernels.quantised import GROUP, Format
from engine.kernels.simd import F32, I64, LANES, Emitter, Value, spread
from engine.kernels.tile import PANEL
from engine.kernels.vector_function import vector_function

_SUMS, _X, _W = (0, 1), 4, (6, 7)
_SUMS_BYTES = 4 * SIDE * PANEL  # of a group: for each half of the panel 16 rows of 16 sums
_GROUPS_AHEAD = 8
_GROUP_BYTES = Format(8, row_bits=8).group_bytes


def _new_memory(emit: Emitter, num_bytes: int) -> Value:
    """The address of memory that the function owns."""
    with emit.builder.goto_entry_block():
        memory = emit.builder.alloca(ir.ArrayType(I64, num_bytes // 8))
    return emit.builder.ptrtoint(memory, I64)


def _emit_block(
    emit: Emitter, _: list[Any], numbers: Value, scales: Value, row: Value, num_groups: Value, weights: Value,
    panel: Value, out: Value, out_at: Value, out_stride: Value, rows: Value,
) -> None:  # fmt: skip
    """Up to 16 rows and one panel."""
    builder = emit.builder
    depth = builder.mul(num_groups, I64(GROUP))
    numbers = emit.offset(numbers, builder.mul(row, depth))
    scales = emit.offset(scales, (builder.mul(row, num_groups), 4))
    weights = emit.offset(weights, (builder.mul(panel, num_groups), _GROUP_BYTES))
    out, out_stride = emit.offset(out, (out_at, 4)), builder.shl(out_stride, I64(2))
    totals, sums = _new_memory(emit, _SUMS_BYTES), _new_memory(emit, 2 * _SUMS_BYTES)
    for at in range(0, _SUMS_BYTES, 4 * LANES):
        emit.store(spread(emit.vector, 0.0), emit.offset(totals, at))
    registers = Registers(emit)
    tiles = dict.fromkeys((*_SUMS, _X), rows) | dict.fromkeys(_W, I64(GROUP // 4))
    registers.configure(tiles, {_X: GROUP})

    def place(group: Value) -> Value:
        """Where a group's sums go: neighbours do not share it."""
        return emit.offset(sums, (builder.and_(group, I64(1)), _SUMS_BYTES))

    def multiply(group: Value) -> None:
        block = emit.offset(weights, (group, _GROUP_BYTES))
        for line in range(0, _GROUP_BYTES, 64):
            emit.prefetch(emit.offset(block, _GROUPS_AHEAD * _GROUP_BYTES, line))
        registers.load(_X, emit.offset(numbers, (group, GROUP)), depth)
        for half, (tile, w) in enumerate(zip(_SUMS, _W, strict=True)):
            registers.zero(tile)
            registers.load(w, emit.offset(block, 4 * SIDE * half), I64(4 * PANEL))
            registers.add_product_int8(tile, _X, w)
            registers.store(tile, emit.offset(place(group), 4 * SIDE * half), I64(4 * PANEL))

    def add_scaled(group: Value) -> None:
        starts = range(0, 4 * PANEL, 4 * LANES)
        block = emit.offset(weights, (group, _GROUP_BYTES), GROUP * PANEL)
        weight_scales = [emit.load(emit.offset(block, start), emit.vector) for start in starts]
        with emit.loop(rows) as index:
            scale_at = emit.offset(scales, (builder.mul(index, num_groups), 4), (group, 4))
            scale = emit.splat(emit.load(scale_at, F32))
            for start, weight_scale in zip(starts, weight_scales, strict=True):
                total_at = emit.offset(totals, (index, 4 * PANEL), start)
                sum_at = emit.offset(place(group), (index, 4 * PANEL), start)
                whole = builder.sitofp(emit.load(sum_at, emit.int_vector), emit.vector)
                total = emit.multiply_add(
                    builder.fmul(whole, weight_scale), scale, emit.load(total_at, emit.vector)
                )
                emit.store(total, total_at)

    multiply(I64(0))
    with emit.loop(builder.sub(num_groups, I64(1))) as group:
        multiply(builder.add(group, I64(1)))
        add_scaled(group)
    add_scaled(builder.sub(num_groups, I64(1)))
    registers.release()
    with emit.loop(rows) as index:
        for start in range(0, 4 * PANEL, 4 * LANES):
            value = emit.load(emit.offset(totals, (index, 4 * PANEL), start), emit.vector)
            emit.store(value, emit.offset(out, builder.mul(index, out_stride), start))


_block = vector_function(_emit_block)


@inlined
def multiply_panel_in_registers(x, num_rows, weights, panel, out, out_at, out_stride):
    """`multiply_quantised_panel` for weights of 8 bits."""
    for row in range(0, num_rows, SIDE):
        rows = min(SIDE, num_rows - row)
        target = out_at + row * out_stride
        _block(x.numbers, x.scales, row, weights.shape[1], weights, panel, out, target, out_stride, rows)
