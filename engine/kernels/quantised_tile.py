# mypy: allow-untyped-defs, allow-untyped-calls
"""Products of quantised rows and weights.

Processors add four products of 8-bit numbers to a sum in one instruction (VNNI). Others add two products of
16-bit numbers to each other, and of 8-bit numbers to 16 bits: those then have to be numbers of 4 bits, of
which eight pairs fit, so weights of 8 bits are taken as two of 4 bits.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir

from engine.kernels.jit import by_type, device
from engine.kernels.quantised import GROUP, HAS_VNNI, NUM_RUNS, RUN, Format, format_of
from engine.kernels.simd import CPU_FEATURES, F32, I8, I16, I32, I64, LANES, Emitter, Value, spread
from engine.kernels.tile import MAX_TILE_ROWS, PANEL, VECTORS_PER_PANEL
from engine.kernels.vector_function import vector_function

_ADDS_PAIRS = bool(CPU_FEATURES.get("avx512bw" if LANES == 16 else "avx2"))
_BYTES, _SHORTS = ir.VectorType(I8, 4 * LANES), ir.VectorType(I16, 2 * LANES)
_VECTORS = range(VECTORS_PER_PANEL)


class _Operand(NamedTuple):
    """Numbers unpacked from one load of weights, and where in a group of a row their factors begin."""

    unpack: Callable[[Value], Value]
    x_at: int


class _Sums:
    """Emits the whole sums of a group for some rows and a panel: [rows][vectors] of int32."""

    def __init__(self, emit: Emitter, format: Format, x_rows: list[Value], numbers: Value, next_group: Value):
        self.emit, self.format, self.x_rows, self.numbers = emit, format, x_rows, numbers
        self.next_group = next_group
        self.num_steps = format.scales_at // (RUN * PANEL)
        self.parts = range(NUM_RUNS // self.num_steps)  # runs that share bytes

    def emit_all(self) -> list[list[Value]]:
        if self.format.row_bits == 16 and not HAS_VNNI:
            pairs = [(part, pair) for part in self.parts for pair in (0, 1)]
            return self._add_up([self._pair_operand(part, pair) for part, pair in pairs], self._add_two)
        if HAS_VNNI or not _ADDS_PAIRS:
            return self._add_up([self._byte_operand(part) for part in self.parts], self._add_four)
        if self.format.bits == 4:
            return self._add_nibbles([self._byte_operand(part) for part in self.parts])
        lower, upper = (self._add_nibbles([_Operand(get, 0)]) for get in (self._low, self._high))
        builder, four = self.emit.builder, spread(self.emit.int_vector, 4)
        return [
            [builder.add(a, builder.shl(b, four)) for a, b in zip(low, high, strict=True)]
            for low, high in zip(lower, upper, strict=True)
        ]

    def _byte_operand(self, part: int) -> _Operand:
        """A run's numbers, a byte each."""
        if self.format.bits == 8:
            return _Operand(self._raised, 0)
        return _Operand(self._high if part else self._low, part * self.num_steps * RUN)

    def _pair_operand(self, part: int, pair: int) -> _Operand:
        """Every other of a run's numbers, 16 bits each."""
        shift, mask = self.format.bits * part + 8 * pair, (1 << self.format.bits) - 1

        def unpack(packed: Value) -> Value:
            builder = self.emit.builder
            shorts = builder.bitcast(self._raised(packed), _SHORTS)
            return builder.and_(builder.lshr(shorts, spread(_SHORTS, shift)), spread(_SHORTS, mask))

        return _Operand(unpack, part * self.num_steps * 2 * RUN + 4 * pair)

    def _raised(self, packed: Value) -> Value:
        """Numbers of 8 bits, from 0."""
        return self.emit.builder.xor(packed, spread(_BYTES, 0x80)) if self.format.bits == 8 else packed

    def _low(self, packed: Value) -> Value:
        return self.emit.builder.and_(self._raised(packed), spread(_BYTES, 0x0F))

    def _high(self, packed: Value) -> Value:
        return self.emit.builder.lshr(self._raised(packed), spread(_BYTES, 4))

    def _add_nibbles(self, operands: list[_Operand]) -> list[list[Value]]:
        builder, ones = self.emit.builder, spread(_SHORTS, 1)
        return [
            [self._add_products(builder.bitcast(total, _SHORTS), ones) for total in totals]
            for totals in self._add_up(operands, self._add_four_to_pairs)
        ]

    def _add_up(
        self, operands: list[_Operand], add: Callable[[Value, Value, Value], Value]
    ) -> list[list[Value]]:
        emit, builder = self.emit, self.emit.builder
        row_size = 1 if HAS_VNNI else self.format.row_bits // 8
        sums = [[emit.variable(spread(emit.int_vector, 0)) for _ in _VECTORS] for _ in self.x_rows]
        with emit.loop(I64(self.num_steps)) as step:
            # The panel after this, while this one is worked on.
            for line in range(0, RUN * PANEL, 64):
                emit.prefetch(emit.offset(self.next_group, (step, RUN * PANEL), line))
            packed = [
                emit.load(emit.offset(self.numbers, (step, RUN * PANEL), RUN * LANES * v), _BYTES, align=1)
                for v in _VECTORS
            ]
            for unpack, x_at in operands:
                numbers = [unpack(vector) for vector in packed]
                for x_row, row_sums in zip(self.x_rows, sums, strict=True):
                    address = emit.offset(x_row, (step, RUN * row_size), x_at)
                    x = emit.splat(emit.load(address, I32, align=1))
                    for number, variable in zip(numbers, row_sums, strict=True):
                        builder.store(add(builder.load(variable), number, x), variable)
        return [[builder.load(variable) for variable in row_sums] for row_sums in sums]

    def _add_four(self, total: Value, numbers: Value, x: Value) -> Value:
        """total + the four products of bytes in each 32-bit lane."""
        emit, builder = self.emit, self.emit.builder
        if HAS_VNNI:
            operands = [total, numbers, builder.bitcast(x, _BYTES)]
            return emit.call(f"llvm.x86.avx512.vpdpbusd.{32 * LANES}", emit.int_vector, operands)
        words = builder.bitcast(numbers, emit.int_vector)
        byte, top = spread(emit.int_vector, 0xFF), spread(emit.int_vector, 24)
        for index in range(RUN):
            number = builder.and_(builder.lshr(words, spread(emit.int_vector, 8 * index)), byte)
            factor = builder.ashr(builder.shl(x, spread(emit.int_vector, 24 - 8 * index)), top)
            total = builder.add(total, builder.mul(number, factor))
        return total

    def _add_four_to_pairs(self, total: Value, numbers: Value, x: Value) -> Value:
        """total + two sums of two products, each in a 16-bit half; |sum| <= 2 * 15 * 127."""
        builder = self.emit.builder
        name = "avx512.pmaddubs.w.512" if LANES == 16 else "avx2.pmadd.ub.sw"
        pairs = self.emit.call(f"llvm.x86.{name}", _SHORTS, [numbers, builder.bitcast(x, _BYTES)])
        return builder.bitcast(builder.add(builder.bitcast(total, _SHORTS), pairs), self.emit.int_vector)

    def _add_two(self, total: Value, numbers: Value, x: Value) -> Value:
        """total + the two products of 16-bit numbers in each 32-bit lane."""
        builder = self.emit.builder
        return builder.add(total, self._add_products(numbers, builder.bitcast(x, _SHORTS)))

    def _add_products(self, a: Value, b: Value) -> Value:
        """In each 32-bit lane the sum of the products of its two 16-bit numbers."""
        emit, builder = self.emit, self.emit.builder
        if _ADDS_PAIRS:
            name = "avx512.pmaddw.d.512" if LANES == 16 else "avx2.pmadd.wd"
            return emit.call(f"llvm.x86.{name}", emit.int_vector, [a, b])
        half = spread(emit.int_vector, 16)
        a, b = (builder.bitcast(numbers, emit.int_vector) for numbers in (a, b))
        low = [builder.ashr(builder.shl(words, half), half) for words in (a, b)]
        high = [builder.ashr(words, half) for words in (a, b)]
        return builder.add(builder.mul(*low), builder.mul(*high))


def _emit_rows(
    emit: Emitter, format: Format, num_rows: int, x: tuple[Value, Value, Value], num_groups: Value,
    weights: Value, out: Value, out_stride: Value,
) -> None:  # fmt: skip
    """The product of num_rows rows and one panel; x: numbers, scales, sums."""
    builder, group_bytes = emit.builder, GROUP * format.row_bits // 8
    numbers, scales, sums = x
    totals = [[emit.variable(spread(emit.vector, 0.0)) for _ in _VECTORS] for _ in range(num_rows)]
    panel_bytes = builder.mul(num_groups, I64(format.group_bytes))
    with emit.loop(num_groups) as group:
        rows = [
            emit.offset(numbers, (num_groups, group_bytes * row), (group, group_bytes))
            for row in range(num_rows)
        ]
        if format.splits_rows:
            rows = [part for row in rows for part in (row, emit.offset(row, GROUP))]
        block = emit.offset(weights, (group, format.group_bytes))
        products = _Sums(emit, format, rows, block, emit.offset(block, panel_bytes)).emit_all()
        if format.splits_rows:
            products = [_join(emit, *both) for both in zip(products[::2], products[1::2], strict=True)]
        emit.prefetch(emit.offset(block, panel_bytes, format.scales_at))
        emit.prefetch(emit.offset(block, panel_bytes, format.scales_at + 64))
        weight_scales = format.scales(emit, block)
        for row in range(num_rows):
            at = (num_groups, 4 * row), (group, 4)
            x_scale = emit.splat(emit.load(emit.offset(scales, *at), F32))
            x_sum = emit.splat(emit.load(emit.offset(sums, *at), F32))
            for (scale, minimum), product, variable in zip(
                weight_scales, products[row], totals[row], strict=True
            ):
                scaled = builder.fmul(builder.sitofp(product, emit.vector), scale)
                total = emit.multiply_add(minimum, x_sum, builder.load(variable))
                builder.store(emit.multiply_add(scaled, x_scale, total), variable)
    for row in range(num_rows):
        for vector, variable in enumerate(totals[row]):
            emit.store(builder.load(variable), emit.offset(out, (out_stride, 4 * row), 4 * LANES * vector))


def _join(emit: Emitter, upper: list[Value], lower: list[Value]) -> list[Value]:
    """Sums for the bytes of 16-bit numbers as sums for the numbers."""
    builder, eight = emit.builder, spread(emit.int_vector, 8)
    return [builder.add(builder.shl(high, eight), low) for high, low in zip(upper, lower, strict=True)]


def _max_rows(format: Format) -> int:
    return MAX_TILE_ROWS // 2 if format.splits_rows else MAX_TILE_ROWS


def _emit_tiles(
    emit: Emitter, dtypes: list[Any], numbers: Value, scales: Value, sums: Value, row: Value,
    num_groups: Value, weights: Value, panel: Value, out: Value, out_at: Value, out_stride: Value,
    rows: Value,
) -> None:  # fmt: skip
    """A switch over the number of rows."""
    builder, format = emit.builder, format_of(dtypes[3])
    first = builder.mul(row, num_groups)
    numbers = emit.offset(numbers, (first, GROUP * format.row_bits // 8))
    x = numbers, emit.offset(scales, (first, 4)), emit.offset(sums, (first, 4))
    weights = emit.offset(weights, (builder.mul(panel, num_groups), format.group_bytes))
    out = emit.offset(out, (out_at, 4))
    for count in emit.cases(rows, range(1, _max_rows(format) + 1)):
        _emit_rows(emit, format, count, x, num_groups, weights, out, out_stride)


_tile = vector_function(_emit_tiles)


@by_type
def _max_tile_rows(weights):
    limit = _max_rows(format_of(weights.dtype))
    return lambda weights: limit


@device
def multiply_quantised_panel(x, num_rows, weights, panel, out, out_at, out_stride):
    """out = the first of the `QuantisedRows` x times one panel; out_at is the flat index of the first
    result."""
    num_blocks = -(-num_rows // _max_tile_rows(weights))
    for block in range(num_blocks):
        row = block * num_rows // num_blocks
        rows = (block + 1) * num_rows // num_blocks - row
        target = out_at + row * out_stride
        _tile(
            x.numbers, x.scales, x.sums, row, weights.shape[1], weights, panel, out, target, out_stride, rows
        )
