"""The inner loops of attention as vector code.

A page holds 16 tokens of one KV head, [16, D], in the cache's dtype; queries, scores, weights and sums are
float32 rows. Arrays are contiguous and addressed by flat indices; strides count elements.
"""

from typing import Any

from llvmlite import ir

from engine.kernels.simd import F32, I64, LANES, Emitter, Value, element_bytes, element_kind, spread
from engine.kernels.vector_function import vector_function

PAGE = 16
# Query rows that meet a page at once, keys of it at once: 12 sums stay in registers.
ROW_BLOCK, _KEY_BLOCK = 3, 4
COLUMN_BLOCK = 32  # of a value row; head sizes are multiples of it
_TRANSPOSE = 8


def _sum_each(emit: Emitter, vectors: list[Value]) -> Value:
    """The sums over the lanes of four vectors, as a vector of four."""
    first, second, third, fourth = vectors
    total = _add_neighbours(emit, _add_neighbours(emit, first, second), _add_neighbours(emit, third, fourth))
    while (count := total.type.count) > 4:
        low, high = range(count // 2), range(count // 2, count)
        total = emit.builder.fadd(emit.shuffle(total, total, low), emit.shuffle(total, total, high))
    return total


def _add_neighbours(emit: Emitter, a: Value, b: Value) -> Value:
    """In each group of four lanes: a0 + a1, a2 + a3, b0 + b1, b2 + b3, which is a cheap instruction on
    x86."""
    even = [group + lane for group in range(0, LANES, 4) for lane in (0, 2, LANES, LANES + 2)]
    return emit.builder.fadd(emit.shuffle(a, b, even), emit.shuffle(a, b, [lane + 1 for lane in even]))


def _prefetch(emit: Emitter, address: Value, num_bytes: int) -> None:
    """A share of the page that comes next: pages lie anywhere, so the processor does not foresee them."""
    for line in range(0, num_bytes, 64):
        emit.prefetch(emit.offset(address, line))


def _emit_scores(emit: Emitter, element: str, num_rows: int, operands: list[Value]) -> None:
    query, query_stride, keys, next_keys, dim, scores, scores_stride = operands
    builder, size = emit.builder, element_bytes(element)
    with emit.loop(I64(PAGE // _KEY_BLOCK)) as block:
        first = emit.offset(keys, (builder.mul(block, dim), size * _KEY_BLOCK))
        sums = [[emit.variable(spread(emit.vector, 0.0)) for _ in range(_KEY_BLOCK)] for _ in range(num_rows)]
        with emit.loop(builder.udiv(dim, I64(LANES))) as step:
            share = size * _KEY_BLOCK * LANES
            _prefetch(
                emit,
                emit.offset(next_keys, (builder.mul(block, dim), size * _KEY_BLOCK), (step, share)),
                share,
            )
            for key in range(_KEY_BLOCK):
                address = emit.offset(first, (dim, size * key), (step, size * LANES))
                vector = emit.load_element(address, element, emit.vector)
                for row in range(num_rows):
                    part = emit.load(
                        emit.offset(query, (query_stride, 4 * row), (step, 4 * LANES)), emit.vector
                    )
                    total = emit.multiply_add(part, vector, builder.load(sums[row][key]))
                    builder.store(total, sums[row][key])
        for row in range(num_rows):
            total = _sum_each(emit, [builder.load(variable) for variable in sums[row]])
            emit.store(total, emit.offset(scores, (scores_stride, 4 * row), (block, 4 * _KEY_BLOCK)))


def _emit_values(emit: Emitter, element: str, num_rows: int, operands: list[Value]) -> None:
    weights, weights_stride, values, next_values, num_keys, dim, out, out_stride = operands
    builder, size = emit.builder, element_bytes(element)
    lanes = range(0, COLUMN_BLOCK, LANES)
    with emit.loop(builder.udiv(dim, I64(COLUMN_BLOCK))) as block:
        rows = [emit.offset(out, (out_stride, 4 * row), (block, 4 * COLUMN_BLOCK)) for row in range(num_rows)]
        targets = [[emit.offset(row, 4 * lane) for lane in lanes] for row in rows]
        sums = [[emit.variable(emit.load(address, emit.vector)) for address in row] for row in targets]
        with emit.loop(num_keys) as key:
            place = (builder.mul(key, dim), size), (block, size * COLUMN_BLOCK)
            start = emit.offset(values, *place)
            _prefetch(emit, emit.offset(next_values, *place), size * COLUMN_BLOCK)
            rows = [emit.offset(weights, (weights_stride, 4 * row), (key, 4)) for row in range(num_rows)]
            factors = [emit.splat(emit.load(row, F32)) for row in rows]
            for column, lane in enumerate(lanes):
                vector = emit.load_element(emit.offset(start, size * lane), element, emit.vector)
                for factor, row_sums in zip(factors, sums, strict=True):
                    total = emit.multiply_add(factor, vector, builder.load(row_sums[column]))
                    builder.store(total, row_sums[column])
        for row_targets, row_sums in zip(targets, sums, strict=True):
            for address, variable in zip(row_targets, row_sums, strict=True):
                emit.store(builder.load(variable), address)


def _emit_transpose(emit: Emitter, element: str, operands: list[Value]) -> None:
    keys, dim, out, out_stride = operands
    size, side = element_bytes(element), _TRANSPOSE
    vector = ir.VectorType(F32, side)
    with emit.loop(emit.builder.udiv(dim, I64(side))) as block:
        for first in range(0, PAGE, side):
            addresses = [
                emit.offset(keys, (dim, size * (first + key)), (block, size * side)) for key in range(side)
            ]
            rows = [emit.load_element(address, element, vector) for address in addresses]
            target = emit.offset(out, (emit.builder.mul(block, out_stride), 4 * side), 4 * first)
            for index, column in enumerate(_transposed(emit, rows)):
                emit.store(column, emit.offset(target, (out_stride, 4 * index)))


def _transposed(emit: Emitter, rows: list[Value]) -> list[Value]:
    """Eight vectors of eight, mirrored at the diagonal: pairs, pairs of pairs, then halves, as x86 shuffles
    within halves."""
    singles = ((0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15))
    doubles = ((0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15))
    halves = ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
    pairs = [[emit.shuffle(rows[i], rows[i + 1], lanes) for lanes in singles] for i in (0, 2, 4, 6)]
    quads = [
        [emit.shuffle(pairs[i][part], pairs[i + 1][part], lanes) for part in (0, 1) for lanes in doubles]
        for i in (0, 2)
    ]
    return [emit.shuffle(low, high, lanes) for lanes in halves for low, high in zip(*quads, strict=True)]


def _emit_page_scores(
    emit: Emitter, dtypes: list[Any], query: Value, query_at: Value, query_stride: Value, cache: Value,
    page_at: Value, next_at: Value, dim: Value, scores: Value, scores_at: Value, scores_stride: Value,
    rows: Value,
) -> None:  # fmt: skip
    element = element_kind(dtypes[1])
    query, scores = emit.offset(query, (query_at, 4)), emit.offset(scores, (scores_at, 4))
    pages = [emit.offset(cache, (at, element_bytes(element))) for at in (page_at, next_at)]
    operands = [query, query_stride, *pages, dim, scores, scores_stride]
    for count in emit.cases(rows, range(1, ROW_BLOCK + 1)):
        _emit_scores(emit, element, count, operands)


def _emit_page_values(
    emit: Emitter, dtypes: list[Any], weights: Value, weights_at: Value, weights_stride: Value, cache: Value,
    page_at: Value, next_at: Value, num_keys: Value, dim: Value, out: Value, out_at: Value, out_stride: Value,
    rows: Value,
) -> None:  # fmt: skip
    element = element_kind(dtypes[1])
    weights, out = emit.offset(weights, (weights_at, 4)), emit.offset(out, (out_at, 4))
    pages = [emit.offset(cache, (at, element_bytes(element))) for at in (page_at, next_at)]
    operands = [weights, weights_stride, *pages, num_keys, dim, out, out_stride]
    for count in emit.cases(rows, range(1, ROW_BLOCK + 1)):
        _emit_values(emit, element, count, operands)


def _emit_transpose_page(
    emit: Emitter, dtypes: list[Any], cache: Value, page_at: Value, dim: Value, out: Value, out_at: Value,
    out_stride: Value,
) -> None:  # fmt: skip
    element = element_kind(dtypes[0])
    page = emit.offset(cache, (page_at, element_bytes(element)))
    _emit_transpose(emit, element, [page, dim, emit.offset(out, (out_at, 4)), out_stride])


def _emit_transpose_pairs(
    emit: Emitter, _: list[Any], cache: Value, page_at: Value, num_words: Value, out: Value, out_at: Value,
    out_stride: Value,
) -> None:  # fmt: skip
    # Moved, not computed with: any 4 bytes will do as a float32.
    _emit_transpose(
        emit,
        "float32",
        [emit.offset(cache, (page_at, 2)), num_words, emit.offset(out, (out_at, 4)), out_stride],
    )


def _emit_prefetch_page(emit: Emitter, dtypes: list[Any], cache: Value, page_at: Value, dim: Value) -> None:
    page_bytes = emit.builder.mul(dim, I64(PAGE * element_bytes(element_kind(dtypes[0]))))
    with emit.loop(emit.builder.udiv(page_bytes, I64(64))) as line:
        emit.prefetch(emit.offset(cache, (page_at, element_bytes(element_kind(dtypes[0]))), (line, 64)))


# page_scores(query, query_at, query_stride, cache, page_at, next_at, dim, scores, scores_at, scores_stride,
# rows):
#   scores[row, key] = query[row] · page[key], for 1 to ROW_BLOCK rows and the 16 keys of a page. next_at is
#   the page that is wanted next.
page_scores = vector_function(_emit_page_scores)

# page_values(weights, weights_at, weights_stride, cache, page_at, next_at, num_keys, dim, out, out_at,
# out_stride, rows):
#   out[row] += sum over the page's first num_keys of weights[row, key] * page[key], for 1 to ROW_BLOCK rows.
page_values = vector_function(_emit_page_values)

# transpose_page(cache, page_at, dim, out, out_at, out_stride): out[d, key] = page[key, d].
transpose_page = vector_function(_emit_transpose_page)

# transpose_pairs(cache, page_at, num_words, out, out_at, out_stride): the same for pairs of 2-byte numbers,
# out[pair, key] = page[key, pair].
transpose_pairs = vector_function(_emit_transpose_pairs)

# prefetch_page(cache, page_at, dim): brings a page near.
prefetch_page = vector_function(_emit_prefetch_page)
