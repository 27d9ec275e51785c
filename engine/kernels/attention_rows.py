"""Operations on rows of attention as vector code: running softmax, and copies and sums of head-sized rows.

Arrays are contiguous and addressed by flat indices. Row sizes are multiples of the lanes.
"""

from typing import Any

from llvmlite import ir

from engine.kernels.simd import F32, I32, I64, LANES, Emitter, Value, element_bytes, element_kind, spread
from engine.kernels.vector_function import vector_function

SOFTMAX_ROWS = 4  # at once, at most: while one waits for its own results the others go on


def _emit_softmax_rows(
    emit: Emitter, _: list[Any], scores: Value, first: Value, scores_stride: Value, num_visible: Value,
    num_keys: Value, maxima: Value, sums: Value, out: Value, dim: Value, rows: Value,
) -> None:  # fmt: skip
    scores = emit.offset(scores, (emit.builder.mul(first, scores_stride), 4))
    maxima, sums = emit.offset(maxima, (first, 4)), emit.offset(sums, (first, 4))
    out = emit.offset(out, (emit.builder.mul(first, dim), 4))
    steps = emit.builder.udiv(emit.offset(num_keys, LANES - 1), I64(LANES))
    for count in emit.cases(rows, range(1, SOFTMAX_ROWS + 1)):
        weights = [emit.offset(scores, (scores_stride, 4 * row)) for row in range(count)]
        _emit_hiding(emit, weights, steps, num_visible)
        previous = [emit.load(emit.offset(maxima, 4 * row), F32) for row in range(count)]
        new = _emit_maxima(emit, weights, steps, previous)
        weight_sums = _emit_weights(emit, weights, steps, new)
        for row in range(count):
            decay = emit.exp2(emit.builder.fsub(previous[row], new[row]))
            emit.store(new[row], emit.offset(maxima, 4 * row))
            total = emit.offset(sums, 4 * row)
            emit.store(emit.multiply_add(emit.load(total, F32), decay, weight_sums[row]), total)
            with emit.builder.if_then(emit.builder.fcmp_unordered("!=", previous[row], new[row])):
                factor, target = emit.splat(decay), emit.offset(out, (dim, 4 * row))
                with emit.loop(emit.builder.udiv(dim, I64(LANES))) as step:
                    address = emit.offset(target, (step, 4 * LANES))
                    emit.store(emit.builder.fmul(emit.load(address, emit.vector), factor), address)


def _emit_hiding(emit: Emitter, rows: list[Value], steps: Value, num_visible: Value) -> None:
    """Scores from num_visible on become -inf."""
    builder = emit.builder
    limit = emit.splat(builder.trunc(num_visible, I32))
    begin = builder.udiv(num_visible, I64(LANES))
    with emit.loop(builder.sub(steps, begin)) as step:
        place = builder.add(begin, step)
        first = emit.splat(builder.trunc(builder.mul(place, I64(LANES)), I32))
        index = builder.add(first, ir.Constant(emit.int_vector, list(range(LANES))))
        for row in rows:
            address = emit.offset(row, (place, 4 * LANES))
            score = emit.load(address, emit.vector)
            seen = builder.icmp_signed("<", index, limit)
            emit.store(builder.select(seen, score, spread(emit.vector, float("-inf"))), address)


def _emit_maxima(emit: Emitter, rows: list[Value], steps: Value, previous: list[Value]) -> list[Value]:
    """The largest of each row's scores and its number in `previous`."""
    largest = [emit.variable(spread(emit.vector, float("-inf"))) for _ in rows]
    with emit.loop(steps) as step:
        for row, variable in zip(rows, largest, strict=True):
            score = emit.load(emit.offset(row, (step, 4 * LANES)), emit.vector)
            emit.builder.store(emit.maximum(score, emit.builder.load(variable)), variable)
    return [
        emit.maximum(emit.max_lanes(emit.builder.load(variable)), number)
        for variable, number in zip(largest, previous, strict=True)
    ]


def _emit_weights(emit: Emitter, rows: list[Value], steps: Value, maxima: list[Value]) -> list[Value]:
    """Scores become 2^(score - maximum); returns the sum of each row's."""
    builder = emit.builder
    totals = [emit.variable(spread(emit.vector, 0.0)) for _ in rows]
    shifts = [emit.splat(maximum) for maximum in maxima]
    with emit.loop(steps) as step:
        for row, shift, total in zip(rows, shifts, totals, strict=True):
            address = emit.offset(row, (step, 4 * LANES))
            weight = emit.exp2(builder.fsub(emit.load(address, emit.vector), shift))
            emit.store(weight, address)
            builder.store(builder.fadd(weight, builder.load(total)), total)
    return [emit.sum_lanes(builder.load(total)) for total in totals]


def _emit_scaled(
    emit: Emitter, dtypes: list[Any], source: Value, source_at: Value, factor: Value, target: Value,
    target_at: Value, size: Value, add: bool,
) -> None:  # fmt: skip
    element = element_kind(dtypes[0])
    source, target = (
        emit.offset(source, (source_at, element_bytes(element))),
        emit.offset(target, (target_at, 4)),
    )
    factors = emit.splat(factor)
    with emit.loop(emit.builder.udiv(size, I64(LANES))) as step:
        address = emit.offset(target, (step, 4 * LANES))
        vector = emit.load_element(
            emit.offset(source, (step, element_bytes(element) * LANES)), element, emit.vector
        )
        base = emit.load(address, emit.vector) if add else spread(emit.vector, 0.0)
        emit.store(emit.multiply_add(vector, factors, base), address)


def _emit_copy_scaled(
    emit: Emitter, dtypes: list[Any], source: Value, source_at: Value, factor: Value, target: Value,
    target_at: Value, size: Value,
) -> None:  # fmt: skip
    _emit_scaled(emit, dtypes, source, source_at, factor, target, target_at, size, add=False)


def _emit_add_scaled(
    emit: Emitter, dtypes: list[Any], source: Value, source_at: Value, factor: Value, target: Value,
    target_at: Value, size: Value,
) -> None:  # fmt: skip
    _emit_scaled(emit, dtypes, source, source_at, factor, target, target_at, size, add=True)


def _emit_clear(emit: Emitter, _: list[Any], target: Value, target_at: Value, size: Value) -> None:
    with emit.loop(emit.builder.udiv(size, I64(LANES))) as step:
        emit.store(spread(emit.vector, 0.0), emit.offset(target, (target_at, 4), (step, 4 * LANES)))


# softmax_rows(scores, first, scores_stride, num_visible, num_keys, maxima, sums, out, dim, rows):
#   one more block of keys of the running softmax of rows `first` to first + rows, at most SOFTMAX_ROWS.
#   scores become weights 2^(score - maximum), of the first num_visible keys; maxima, sums and out [., dim]
#   are brought to the new maximum. scores has room up to a multiple of the lanes.
softmax_rows = vector_function(_emit_softmax_rows)

# copy_scaled(source, source_at, factor, target, target_at, size): target = source * factor; source may be of
# a cache's dtype.
# add_scaled(...): target += source * factor. clear(target, target_at, size): target = 0.
copy_scaled = vector_function(_emit_copy_scaled)
add_scaled = vector_function(_emit_add_scaled)
clear = vector_function(_emit_clear)
