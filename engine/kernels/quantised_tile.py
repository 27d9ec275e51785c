# mypy: allow-untyped-defs, allow-untyped-calls
"""Products of quantised rows and weights.

Processors multiply four 8-bit numbers and add the products to a sum in one instruction (VNNI). Those that
add only pairs of products, to 16 bits, get numbers of 4 bits, of which 8 pairs fit; numbers of 8 bits are two
of 4 bits there.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from engine.kernels.jit import device
from engine.kernels.quantised import GROUP, RUN, Format, format_of, row_parts
from engine.kernels.simd import CPU_FEATURES, F32, I8, I16, I32, I64, LANES, Emitter, Value, spread
from engine.kernels.tile import MAX_TILE_ROWS, PANEL, VECTORS_PER_PANEL
from engine.kernels.vector_function import vector_function

_HAS_VNNI = all(map(CPU_FEATURES.get, ("avx512vnni", "avx512vl"))) or (
    LANES == 8 and bool(CPU_FEATURES.get("avxvnni"))
)
_ADDS_PAIRS = bool(CPU_FEATURES.get("avx512bw" if LANES == 16 else "avx2"))
_BITS = 32 * LANES
_VECTORS = range(VECTORS_PER_PANEL)
# A number's byte, or half of it, becomes one from 0 to 255, or to 15.
Unpack = Callable[[Value], Value]


class _Sums:
    """Emits the whole sums of a group for some rows and a panel; one vector of sums for each vector of it."""

    def __init__(self, emit: Emitter, format: Format, x_rows: list[Value], numbers: Value, next_group: Value):
        self.emit, self.format, self.x_rows, self.numbers = emit, format, x_rows, numbers
        self.next_group = next_group
        self.bytes = ir.VectorType(I8, 4 * LANES)

    def emit_all(self) -> list[list[Value]]:
        """[rows][vectors] of int32."""
        if _HAS_VNNI or not _ADDS_PAIRS:
            return self._add_up(self._in_bytes(), emit_add=self._add_four, finish=lambda total: total)
        if self.format.bits == 4:
            return self._add_pairs(self._in_bytes())
        lower, upper = self._add_pairs([self._low]), self._add_pairs([self._high])
        builder, four = self.emit.builder, spread(self.emit.int_vector, 4)
        return [
            [builder.add(a, builder.shl(b, four)) for a, b in zip(low, high, strict=True)]
            for low, high in zip(lower, upper, strict=True)
        ]

    def _in_bytes(self) -> list[Unpack]:
        """A byte holds numbers of as many runs."""
        return [self._raised] if self.format.bits == 8 else [self._low, self._high]

    def _raised(self, packed: Value) -> Value:
        return self.emit.builder.xor(packed, spread(self.bytes, 0x80))

    def _low(self, packed: Value) -> Value:
        return self.emit.builder.and_(self._whole(packed), spread(self.bytes, 0x0F))

    def _high(self, packed: Value) -> Value:
        return self.emit.builder.lshr(self._whole(packed), spread(self.bytes, 4))

    def _whole(self, packed: Value) -> Value:
        return self._raised(packed) if self.format.bits == 8 else packed

    def _add_pairs(self, unpacks: list[Unpack]) -> list[list[Value]]:
        return self._add_up(unpacks, emit_add=self._add_to_pairs, finish=self._join_pairs)

    def _add_up(
        self, unpacks: list[Unpack], emit_add: Callable[..., Value], finish: Callable[[Value], Value]
    ) -> list[list[Value]]:
        emit, builder = self.emit, self.emit.builder
        sums = [[emit.variable(spread(emit.int_vector, 0)) for _ in _VECTORS] for _ in self.x_rows]
        num_steps = self.format.scales_at // (RUN * PANEL)
        with emit.loop(I64(num_steps)) as step:
            # The panel after this, while this one is worked on.
            for line in range(0, RUN * PANEL, 64):
                emit.prefetch(emit.offset(self.next_group, (step, RUN * PANEL), line))
            packed = [
                emit.load(
                    emit.offset(self.numbers, (step, RUN * PANEL), RUN * LANES * v), self.bytes, align=1
                )
                for v in _VECTORS
            ]
            for part, unpack in enumerate(unpacks):
                numbers = [unpack(vector) for vector in packed]
                for x_row, row_sums in zip(self.x_rows, sums, strict=True):
                    run_at = emit.offset(x_row, (step, RUN), part * num_steps * RUN)
                    x = emit.splat(emit.load(run_at, I32, align=1))
                    for number, variable in zip(numbers, row_sums, strict=True):
                        builder.store(emit_add(builder.load(variable), number, x), variable)
        return [[finish(builder.load(variable)) for variable in row_sums] for row_sums in sums]

    def _add_four(self, total: Value, numbers: Value, x: Value) -> Value:
        """total + the four products in each 32-bit lane."""
        emit, builder = self.emit, self.emit.builder
        if _HAS_VNNI:
            operands = [total, numbers, builder.bitcast(x, self.bytes)]
            return emit.call(f"llvm.x86.avx512.vpdpbusd.{_BITS}", emit.int_vector, operands)
        words = builder.bitcast(numbers, emit.int_vector)
        byte, top = spread(emit.int_vector, 0xFF), spread(emit.int_vector, 24)
        for index in range(RUN):
            number = builder.and_(builder.lshr(words, spread(emit.int_vector, 8 * index)), byte)
            factor = builder.ashr(builder.shl(x, spread(emit.int_vector, 24 - 8 * index)), top)
            total = builder.add(total, builder.mul(number, factor))
        return total

    def _add_to_pairs(self, total: Value, numbers: Value, x: Value) -> Value:
        """total + two sums of two products, each in a 16-bit half; |sum| <= 2 * 15 * 127."""
        builder, shorts = self.emit.builder, ir.VectorType(I16, 2 * LANES)
        name = "avx512.pmaddubs.w.512" if LANES == 16 else "avx2.pmadd.ub.sw"
        pairs = self.emit.call(f"llvm.x86.{name}", shorts, [numbers, builder.bitcast(x, self.bytes)])
        total = builder.add(builder.bitcast(total, shorts), pairs)
        return builder.bitcast(total, self.emit.int_vector)

    def _join_pairs(self, total: Value) -> Value:
        shorts = ir.VectorType(I16, 2 * LANES)
        name = "avx512.pmaddw.d.512" if LANES == 16 else "avx2.pmadd.wd"
        operands = [self.emit.builder.bitcast(total, shorts), spread(shorts, 1)]
        return self.emit.call(f"llvm.x86.{name}", self.emit.int_vector, operands)


def _emit_rows(
    emit: Emitter, format: Format, num_rows: int, x: tuple[Value, Value, Value], num_groups: Value,
    weights: Value, out: Value, out_stride: Value,
) -> None:  # fmt: skip
    """The product of num_rows rows and one panel; x: numbers, scales, sums."""
    builder, parts = emit.builder, format.row_parts
    numbers, scales, sums = x
    totals = [[emit.variable(spread(emit.vector, 0.0)) for _ in _VECTORS] for _ in range(num_rows)]
    panel_bytes = builder.mul(num_groups, I64(format.group_bytes))
    with emit.loop(num_groups) as group:
        rows = [
            emit.offset(numbers, (num_groups, GROUP * row), (group, GROUP)) for row in range(num_rows * parts)
        ]
        block = emit.offset(weights, (group, format.group_bytes))
        products = _Sums(emit, format, rows, block, emit.offset(block, panel_bytes)).emit_all()
        emit.prefetch(emit.offset(block, panel_bytes, format.scales_at))
        emit.prefetch(emit.offset(block, panel_bytes, format.scales_at + 64))
        if parts == 2:
            products = [_join(emit, *both) for both in zip(products[::2], products[1::2], strict=True)]
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
    """Sums for the halves of 16-bit numbers as sums for the numbers."""
    builder, eight = emit.builder, spread(emit.int_vector, 8)
    return [builder.add(builder.shl(high, eight), low) for high, low in zip(upper, lower, strict=True)]


def _emit_tiles(
    emit: Emitter, dtypes: list[Any], numbers: Value, scales: Value, sums: Value, row: Value,
    num_groups: Value, weights: Value, panel: Value, out: Value, out_at: Value, out_stride: Value,
    rows: Value,
) -> None:  # fmt: skip
    """A switch over the number of rows."""
    builder, format = emit.builder, format_of(dtypes[3])
    first = builder.mul(row, num_groups)
    numbers = emit.offset(numbers, (first, format.row_parts * GROUP))
    x = numbers, emit.offset(scales, (first, 4)), emit.offset(sums, (first, 4))
    weights = emit.offset(weights, (builder.mul(panel, num_groups), format.group_bytes))
    out = emit.offset(out, (out_at, 4))
    for count in emit.cases(rows, range(1, MAX_TILE_ROWS // format.row_parts + 1)):
        _emit_rows(emit, format, count, x, num_groups, weights, out, out_stride)


_tile = vector_function(_emit_tiles)


@device
def multiply_quantised_panel(x, num_rows, weights, panel, out, out_at, out_stride):
    """out = the first of the `QuantisedRows` x times one panel; out_at is the flat index of the first
    result."""
    num_blocks = -(-num_rows // (MAX_TILE_ROWS // row_parts(weights)))
    for block in range(num_blocks):
        row = block * num_rows // num_blocks
        rows = (block + 1) * num_rows // num_blocks - row
        target = out_at + row * out_stride
        _tile(
            x.numbers, x.scales, x.sums, row, weights.shape[1], weights, panel, out, target, out_stride, rows
        )
