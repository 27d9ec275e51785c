# mypy: allow-untyped-defs, allow-untyped-calls
"""8-bit weights for many rows: a panel is widened to bfloat16 once, and multiplied in pairs by all rows."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from engine.kernels.int8 import GROUP, GROUP_BYTES, RUN
from engine.kernels.jit import inlined
from engine.kernels.pairs import multiply_pairs, narrow
from engine.kernels.simd import I64, LANES, Emitter, Value, spread
from engine.kernels.tile import PANEL, VECTORS_PER_PANEL
from engine.kernels.vector_function import vector_function

_GROUPS_AHEAD = 8
Words = npt.NDArray[np.uint32]


class WideOperand(NamedTuple):
    rows: Words  # [rows, K / 2]
    panel: Words  # [K / 2, PANEL]


@inlined
def new_wide_operand(num_rows, depth):
    return WideOperand(np.empty((num_rows, depth // 2), np.uint32), np.empty((depth // 2, PANEL), np.uint32))


@inlined
def narrow_wide_rows(x, row_begin, row_end, operand):
    narrow(x, row_begin * x.shape[1], operand.rows, 0, (row_end - row_begin) * x.shape[1])


def _emit_widen(
    emit: Emitter, _: list[Any], weights: Value, panel: Value, num_groups: Value, words: Value
) -> None:
    builder = emit.builder
    weights = emit.offset(weights, (builder.mul(panel, num_groups), GROUP_BYTES))
    with emit.loop(num_groups) as group:
        block = emit.offset(weights, (group, GROUP_BYTES))
        scales = [
            emit.load(emit.offset(block, GROUP * PANEL + 4 * LANES * v), emit.vector)
            for v in range(VECTORS_PER_PANEL)
        ]
        target = emit.offset(words, (group, 4 * PANEL * GROUP // 2))
        with emit.loop(I64(GROUP // RUN)) as run:
            for line in range(0, RUN * PANEL, 64):
                emit.prefetch(emit.offset(block, _GROUPS_AHEAD * GROUP_BYTES, (run, RUN * PANEL), line))
            for vector, scale in enumerate(scales):
                start = emit.offset(block, (run, RUN * PANEL), RUN * LANES * vector)
                numbers = _load_numbers(emit, start)
                for pair in range(0, RUN, 2):
                    word = _pair_word(emit, numbers[pair], numbers[pair + 1], scale)
                    row = emit.offset(target, (run, 2 * PANEL * RUN), 2 * PANEL * pair)
                    emit.store(word, emit.offset(row, 4 * LANES * vector))


def _load_numbers(emit: Emitter, start: Value) -> list[Value]:
    """The runs of as many outputs as there are lanes, as RUN vectors of 32-bit numbers."""
    builder, bits = emit.builder, 8 * RUN
    lanes = emit.load(start, ir.VectorType(ir.IntType(bits), LANES), align=1)
    wide = lanes if bits == 32 else builder.zext(lanes, emit.int_vector)

    def number(index: int) -> Value:
        up = builder.shl(wide, spread(emit.int_vector, 24 - 8 * index))
        return builder.ashr(up, spread(emit.int_vector, 24))

    return [number(index) for index in range(RUN)]


def _pair_word(emit: Emitter, even: Value, odd: Value, scale: Value) -> Value:
    """Two scaled numbers as bfloat16, rounded to nearest, ties away from zero."""
    builder = emit.builder
    half, high = (spread(emit.int_vector, number) for number in (0x8000, 0xFFFF0000))

    def rounded(number: Value) -> Value:
        product = builder.fmul(builder.sitofp(number, emit.vector), scale)
        return builder.add(builder.bitcast(product, emit.int_vector), half)

    low = builder.lshr(rounded(even), spread(emit.int_vector, 16))
    return builder.or_(low, builder.and_(rounded(odd), high))


# widen(weights, panel, num_groups, words): a panel of int8 weights as words of two bfloat16, [K / 2, PANEL].
_widen = vector_function(_emit_widen)


@inlined
def multiply_wide_panel(operand, num_rows, weights, panel, out, out_at, out_stride):
    """out = the narrowed rows times one panel; out_at is the flat index of the first result."""
    depth = operand.rows.shape[1]
    _widen(weights, panel, weights.shape[1], operand.panel)
    w_panel = (0, PANEL, 0)
    target = (out_at, out_stride)
    multiply_pairs(operand.rows, (0, depth), num_rows, operand.panel, w_panel, depth, out, target, 1, 0)
