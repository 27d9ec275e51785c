# mypy: allow-untyped-defs, allow-untyped-calls
"""Quantised weights for many rows: a panel becomes bfloat16 once, and is multiplied in pairs by all rows."""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.kernels.jit import inlined
from engine.kernels.pairs import multiply_pairs, narrow
from engine.kernels.quantised import GROUP, NUM_RUNS, RUN, Format, format_of
from engine.kernels.simd import I64, LANES, Emitter, Value, spread
from engine.kernels.tile import PANEL
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
    emit: Emitter, dtypes: list[Any], weights: Value, panel: Value, num_groups: Value, words: Value
) -> None:
    builder, format = emit.builder, format_of(dtypes[0])
    weights = emit.offset(weights, (builder.mul(panel, num_groups), format.group_bytes))
    num_steps = format.scales_at // (RUN * PANEL)
    with emit.loop(num_groups) as group:
        block = emit.offset(weights, (group, format.group_bytes))
        scales = format.scales(emit, block)
        target = emit.offset(words, (group, 4 * PANEL * GROUP // 2))
        with emit.loop(I64(num_steps)) as step:
            for line in range(0, RUN * PANEL, 64):
                emit.prefetch(
                    emit.offset(block, _GROUPS_AHEAD * format.group_bytes, (step, RUN * PANEL), line)
                )
            for vector, (scale, minimum) in enumerate(scales):
                start = emit.offset(block, (step, RUN * PANEL), RUN * LANES * vector)
                packed = emit.load(start, emit.int_vector, align=1)
                for part in range(NUM_RUNS // num_steps):
                    numbers = [
                        emit.multiply_add(_number(emit, format, packed, index, part), scale, minimum)
                        for index in range(RUN)
                    ]
                    # A run is two words of each output.
                    run = emit.offset(
                        target,
                        (step, 2 * PANEL * RUN),
                        part * num_steps * 2 * PANEL * RUN,
                        4 * LANES * vector,
                    )
                    for pair in range(0, RUN, 2):
                        word = _pair_word(emit, numbers[pair], numbers[pair + 1])
                        emit.store(word, emit.offset(run, 2 * PANEL * pair))


def _number(emit: Emitter, format: Format, packed: Value, index: int, part: int) -> Value:
    """The number in a byte of each lane, or in the lower or upper half of it, as float32."""
    builder = emit.builder
    if format.bits == 8:
        packed = builder.xor(packed, spread(emit.int_vector, 0x80 << 8 * index))
    shifted = builder.lshr(packed, spread(emit.int_vector, 8 * index + format.bits * part))
    mask = spread(emit.int_vector, (1 << format.bits) - 1)
    return builder.sitofp(builder.and_(shifted, mask), emit.vector)


def _pair_word(emit: Emitter, even: Value, odd: Value) -> Value:
    """Two numbers as bfloat16, rounded to nearest, ties away from zero."""
    builder = emit.builder
    half, high = (spread(emit.int_vector, number) for number in (0x8000, 0xFFFF0000))

    def rounded(number: Value) -> Value:
        return builder.add(builder.bitcast(number, emit.int_vector), half)

    low = builder.lshr(rounded(even), spread(emit.int_vector, 16))
    return builder.or_(low, builder.and_(rounded(odd), high))


# widen(weights, panel, num_groups, words): a panel as words of two bfloat16, [K / 2, PANEL].
_widen = vector_function(_emit_widen)


@inlined
def multiply_wide_panel(operand, num_rows, weights, panel, out, out_at, out_stride):
    """out = the narrowed rows times one panel; out_at is the flat index of the first result."""
    depth = operand.rows.shape[1]
    _widen(weights, panel, weights.shape[1], operand.panel)
    w_panel = (0, PANEL, 0)
    target = (out_at, out_stride)
    multiply_pairs(operand.rows, (0, depth), num_rows, operand.panel, w_panel, depth, out, target, 1, 0)
