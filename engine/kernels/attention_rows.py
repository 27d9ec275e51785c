"""Operations on rows of attention as vector code: running softmax, and copies and sums of head-sized rows.

Arrays are contiguous and addressed by flat indices. Row sizes are multiples of the lanes.
"""

from typing import Any

from llvmlite import ir

from engine.kernels.simd import F32, I32, I64, LANES, Emitter, Value, element_bytes, element_kind, spread
from engine.kernels.vector_function import vector_function


def _emit_softmax_row(
    emit: Emitter, _: list[Any], scores: Value, scores_at: Value, num_visible: Value, num_keys: Value,
    maxima: Value, sums: Value, row: Value, out: Value, out_at: Value, dim: Value,
) -> None:  # fmt: skip
    builder = emit.builder
    scores = emit.offset(scores, (scores_at, 4))
    steps = builder.udiv(emit.offset(num_keys, LANES - 1), I64(LANES))
    maximum, total = emit.offset(maxima, (row, 4)), emit.offset(sums, (row, 4))
    previous = emit.load(maximum, F32)
    new = _emit_maximum(emit, scores, steps, num_visible, previous)
    weight_sum = _emit_weights(emit, scores, steps, new)
    decay = emit.exp2(builder.fsub(previous, new))
    emit.store(new, maximum)
    emit.store(emit.multiply_add(emit.load(total, F32), decay, weight_sum), total)
    with builder.if_then(builder.fcmp_unordered("!=", previous, new)):
        factor = emit.splat(decay)
        with emit.loop(builder.udiv(dim, I64(LANES))) as step:
            address = emit.offset(out, (out_at, 4), (step, 4 * LANES))
            emit.store(builder.fmul(emit.load(address, emit.vector), factor), address)


def _emit_maximum(emit: Emitter, scores: Value, steps: Value, num_visible: Value, previous: Value) -> Value:
    """Hides the scores from num_visible on, and returns the largest of the others and `previous`."""
    builder = emit.builder
    limit = emit.splat(builder.trunc(num_visible, I32))
    hidden = spread(emit.vector, float("-inf"))
    largest = emit.variable(hidden)
    with emit.loop(steps) as step:
        address = emit.offset(scores, (step, 4 * LANES))
        first = emit.splat(builder.trunc(builder.mul(step, I64(LANES)), I32))
        index = builder.add(first, ir.Constant(emit.int_vector, list(range(LANES))))
        score = builder.select(
            builder.icmp_signed("<", index, limit), emit.load(address, emit.vector), hidden
        )
        emit.store(score, address)
        builder.store(emit.maximum(score, builder.load(largest)), largest)
    return emit.maximum(emit.max_lanes(builder.load(largest)), previous)


def _emit_weights(emit: Emitter, scores: Value, steps: Value, maximum: Value) -> Value:
    """scores = 2^(scores - maximum); returns their sum."""
    builder = emit.builder
    total = emit.variable(spread(emit.vector, 0.0))
    shift = emit.splat(maximum)
    with emit.loop(steps) as step:
        address = emit.offset(scores, (step, 4 * LANES))
        weight = emit.exp2(builder.fsub(emit.load(address, emit.vector), shift))
        emit.store(weight, address)
        builder.store(builder.fadd(weight, builder.load(total)), total)
    return emit.sum_lanes(builder.load(total))


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


# softmax_row(scores, scores_at, num_visible, num_keys, maxima, sums, row, out, out_at, dim):
#   one more block of keys of a row's running softmax. scores become weights 2^(score - maximum), of the first
#   num_visible keys; maxima[row], sums[row] and out [dim] are brought to the new maximum. scores has room up
#   to a multiple of the lanes.
softmax_row = vector_function(_emit_softmax_row)

# copy_scaled(source, source_at, factor, target, target_at, size): target = source * factor; source may be of
# a cache's dtype.
# add_scaled(...): target += source * factor. clear(target, target_at, size): target = 0.
copy_scaled = vector_function(_emit_copy_scaled)
add_scaled = vector_function(_emit_add_scaled)
clear = vector_function(_emit_clear)
