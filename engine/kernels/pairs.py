# mypy: allow-untyped-defs, allow-untyped-calls
"""Products of bfloat16 numbers, for processors that multiply them in pairs (AVX512_BF16, AMX).

Both operands are uint32 words of two neighbours in depth, the even one in the low half. In x they lie as in a
bfloat16 row; in w a word belongs to one column.
"""

from typing import Any

from numba import types

from engine.kernels.amx import SIDE, multiply_words
from engine.kernels.jit import inlined
from engine.kernels.simd import F32, HAS_AMX, I16, I32, I64, LANES, Emitter, Value, like
from engine.kernels.tile import HAS_BFLOAT16_DOT, multiply_rows
from engine.kernels.vector_function import vector_function


def multiplies_pairs(stored: types.Type) -> bool:
    """Whether weights or a cache of this dtype, uint32 words or uint16, are multiplied in pairs here."""
    return HAS_BFLOAT16_DOT and stored in (types.uint32, types.uint16)


def _emit_narrow(
    emit: Emitter, _: list[Any], source: Value, source_at: Value, words: Value, words_at: Value, size: Value
) -> None:
    builder = emit.builder
    source, words = emit.offset(source, (source_at, 4)), emit.offset(words, (words_at, 4))
    num_vectors = builder.udiv(size, I64(LANES))

    def narrow(index: Value, kind: Any) -> None:
        number = emit.load(emit.offset(source, (index, 4)), kind)
        emit.store_element(number, emit.offset(words, (index, 2)), "bfloat16")

    with emit.loop(num_vectors) as step:
        narrow(builder.mul(step, I64(LANES)), emit.vector)
    done = builder.mul(num_vectors, I64(LANES))
    with emit.loop(builder.sub(size, done)) as index:
        narrow(builder.add(done, index), F32)


def _emit_pair_rows(
    emit: Emitter, _: list[Any], source: Value, source_at: Value, num_rows: Value, width: Value, words: Value,
    words_at: Value,
) -> None:  # fmt: skip
    builder = emit.builder
    source, words = emit.offset(source, (source_at, 2)), emit.offset(words, (words_at, 4))
    halves = like(emit.vector, I16)
    num_pairs = builder.udiv(num_rows, I64(2))

    def wide(row: Value, step: Value) -> Value:
        address = emit.offset(source, (builder.mul(row, width), 2), (step, 2 * LANES))
        return builder.zext(emit.load(address, halves, align=2), emit.int_vector)

    def target(pair: Value, step: Value) -> Value:
        return emit.offset(words, (builder.mul(pair, width), 4), (step, 4 * LANES))

    steps = builder.udiv(width, I64(LANES))
    with emit.loop(num_pairs) as pair:
        row = builder.mul(pair, I64(2))
        with emit.loop(steps) as step:
            high = builder.shl(wide(builder.add(row, I64(1)), step), emit.splat(I32(16)))
            emit.store(builder.or_(wide(row, step), high), target(pair, step))
    odd = builder.and_(num_rows, I64(1))
    with builder.if_then(builder.icmp_signed("!=", odd, I64(0))), emit.loop(steps) as step:
        emit.store(wide(builder.sub(num_rows, I64(1)), step), target(num_pairs, step))


# narrow(source, source_at, words, words_at, size): float32 numbers become words, rounded to nearest even.
narrow = vector_function(_emit_narrow)

# pair_rows(source, source_at, num_rows, width, words, words_at): rows [num_rows, width] of bfloat16 become
# words of two rows each, [ceil(num_rows / 2), width]; an odd last row is paired with zeros. width is a
# multiple of the lanes.
pair_rows = vector_function(_emit_pair_rows)


@inlined
def _multiply_in_registers(x, x_row, num_rows, w, w_panel, depth, out, out_row, panels, accumulate):
    if depth % SIDE == 0:
        multiply_words(x, x_row, num_rows, w, w_panel, depth, out, out_row, panels, accumulate)
    else:
        multiply_rows(x, x_row, num_rows, w, w_panel, depth, out, out_row, panels, accumulate)


# `multiply_rows` for uint32 words of both operands; depth counts words.
multiply_pairs = _multiply_in_registers if HAS_AMX else multiply_rows
