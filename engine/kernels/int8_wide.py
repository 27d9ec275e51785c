# mypy: allow-untyped-defs, allow-untyped-calls
"""8-bit weights for many rows: a panel is widened to bfloat16 once, and multiplied in pairs by all rows."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir

from engine.kernels.int8 import GROUP, GROUP_BYTES
from engine.kernels.jit import inlined
from engine.kernels.pairs import multiply_pairs, narrow
from engine.kernels.simd import I8, I16, I64, LANES, Emitter, Value, spread
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
    # Rounded to nearest, ties away from zero.
    sixteen, half, high = (spread(emit.int_vector, number) for number in (16, 0x8000, 0xFFFF0000))
    pairs_of_bytes = ir.VectorType(I8, 2 * LANES)
    with emit.loop(num_groups) as group:
        block = emit.offset(weights, (group, GROUP_BYTES))
        scales = [
            emit.load(emit.offset(block, GROUP * PANEL + 4 * LANES * v), emit.vector)
            for v in range(VECTORS_PER_PANEL)
        ]
        target = emit.offset(words, (group, 4 * PANEL * GROUP // 2))
        with emit.loop(I64(GROUP // 2)) as pair:
            emit.prefetch(emit.offset(block, _GROUPS_AHEAD * GROUP_BYTES, (pair, 2 * PANEL)))
            for vector, scale in enumerate(scales):
                address = emit.offset(block, (pair, 2 * PANEL), 2 * LANES * vector)
                shorts = builder.sext(
                    emit.load(address, pairs_of_bytes, align=1), ir.VectorType(I16, 2 * LANES)
                )
                both = builder.bitcast(shorts, emit.int_vector)
                even, odd = (
                    builder.add(builder.bitcast(builder.fmul(number, scale), emit.int_vector), half)
                    for number in (
                        builder.sitofp(builder.ashr(builder.shl(both, sixteen), sixteen), emit.vector),
                        builder.sitofp(builder.ashr(both, sixteen), emit.vector),
                    )
                )
                word = builder.or_(builder.lshr(even, sixteen), builder.and_(odd, high))
                emit.store(word, emit.offset(target, (pair, 4 * PANEL), 4 * LANES * vector))


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
