# mypy: allow-untyped-defs, allow-untyped-calls
"""The register tile that matrix products are made of.

`out[r, c] (+)= sum_k x[r, k] * w[k, c]` for a few rows and one or two panels of `PANEL` columns: the sums
stay in registers over the whole depth, x is read one number at a time and spread over the lanes. Every sum
runs over k in order, whatever the tile's shape, so a row's result does not depend on how many rows are
computed with it.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from engine.kernels.jit import device, inlined
from engine.kernels.simd import CPU_FEATURES, F32, I32, I64, LANES, Emitter, Value, spread
from engine.kernels.vector_function import vector_function

VECTORS_PER_PANEL = 2
PANEL = VECTORS_PER_PANEL * LANES
# Sums, weights and x of a tile must fit the registers: 16, or 32 with AVX512. Two panels at once where one
# would leave the multipliers waiting for their own results.
MAX_TILE_ROWS, MAX_TWO_PANEL_ROWS = (12, 4) if LANES == 16 else (6, 2)
HAS_BFLOAT16_DOT = LANES == 16 and bool(CPU_FEATURES.get("avx512bf16"))


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def __str__(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


def _shapes() -> list[tuple[int, int]]:
    """(rows, panels) of the tiles there are."""
    single = [(rows, 1) for rows in range(1, MAX_TILE_ROWS + 1)]
    return single + [(rows, 2) for rows in range(1, MAX_TWO_PANEL_ROWS + 1)]


class _Tile:
    """Emits the tile of one shape. Strides are values and count elements of 4 bytes."""

    def __init__(self, emit: Emitter, kind: str, rows: int, panels: int) -> None:
        self.emit, self.kind, self.panels = emit, kind, panels
        zeros = spread(emit.vector, 0.0)
        self.sums = [[emit.variable(zeros) for _ in range(VECTORS_PER_PANEL * panels)] for _ in range(rows)]

    def multiply(
        self, x: Value, x_stride: Value, w: Value, w_stride: Value, panel_stride: Value, depth: Value
    ) -> None:
        emit = self.emit
        x_rows = [emit.offset(x, (x_stride, 4 * row)) for row in range(len(self.sums))]
        panels = [emit.offset(w, (panel_stride, 4 * panel)) for panel in range(self.panels)]
        x_kind = I32 if self.kind == "bfloat16_dot" else F32
        with emit.loop(depth) as step:
            weights = self._weights(panels, emit.builder.mul(step, w_stride), panel_stride)
            for part, part_weights in enumerate(weights):
                for x_row, sums in zip(x_rows, self.sums, strict=True):
                    number = emit.load(emit.offset(x_row, (step, 4 * len(weights)), 4 * part), x_kind)
                    self._accumulate(emit.splat(number), part_weights, sums)

    def _weights(self, panels: list[Value], at: Value, panel_stride: Value) -> list[list[Value]]:
        """Vectors of weights of one step of depth; of two steps, where pairs share 32-bit words."""
        emit = self.emit
        kind = emit.vector if self.kind == "float32" else emit.int_vector
        words = []
        for panel in panels:
            words += [
                emit.load(emit.offset(panel, (at, 4), 4 * LANES * v), kind) for v in range(VECTORS_PER_PANEL)
            ]
            # The panel after these, while this one's work goes on: memory and multipliers are then busy
            # together.
            for line in range(0, 4 * PANEL, 64):
                emit.prefetch(emit.offset(panel, (at, 4), (panel_stride, 4 * self.panels), line))
        if self.kind == "bfloat16":
            return [[emit.low_bfloat16(w) for w in words], [emit.high_bfloat16(w) for w in words]]
        return [words]

    def _accumulate(self, x: Value, weights: list[Value], sums: list[Value]) -> None:
        multiply_add = self._dot if self.kind == "bfloat16_dot" else self.emit.multiply_add
        for weight, variable in zip(weights, sums, strict=True):
            self.emit.builder.store(multiply_add(x, weight, self.emit.builder.load(variable)), variable)

    def _dot(self, x: Value, weight: Value, total: Value) -> Value:
        """total + x·w over the pairs of bfloat16 in the 32-bit lanes."""
        emit = self.emit
        if HAS_BFLOAT16_DOT:
            pairs = ir.VectorType(_BFloat(), 2 * LANES)
            operands = [total, emit.builder.bitcast(x, pairs), emit.builder.bitcast(weight, pairs)]
            return emit.call("llvm.x86.avx512bf16.dpbf16ps.512", emit.vector, operands)
        total = emit.multiply_add(emit.low_bfloat16(x), emit.low_bfloat16(weight), total)
        return emit.multiply_add(emit.high_bfloat16(x), emit.high_bfloat16(weight), total)

    def outputs(self, out: Value, out_stride: Value) -> list[tuple[Value, Value]]:
        """(variable, address) of each vector of sums."""
        return [
            (variable, self.emit.offset(out, (out_stride, 4 * row), 4 * LANES * column))
            for row, variables in enumerate(self.sums)
            for column, variable in enumerate(variables)
        ]


def _emit_tiles(
    emit: Emitter, dtypes: list[Any], x: Value, x_at: Value, x_stride: Value, w: Value, w_at: Value,
    w_stride: Value, panel_stride: Value, depth: Value, out: Value, out_at: Value, out_stride: Value,
    rows: Value, panels: Value, accumulate: Value,
) -> None:  # fmt: skip
    """A switch over the tiles' shapes."""
    x_dtype, w_dtype, _ = dtypes
    kind = (
        "float32" if w_dtype == types.float32 else "bfloat16" if x_dtype == types.float32 else "bfloat16_dot"
    )
    builder = emit.builder
    x, w, out = (emit.offset(array, (at, 4)) for array, at in ((x, x_at), (w, w_at), (out, out_at)))
    add = builder.icmp_signed("!=", accumulate, I64(0))
    shapes = {2 * num_rows + num_panels: (num_rows, num_panels) for num_rows, num_panels in _shapes()}
    for choice in emit.cases(emit.offset(panels, (rows, 2)), shapes):
        tile = _Tile(emit, kind, *shapes[choice])
        with builder.if_then(add):
            for variable, address in tile.outputs(out, out_stride):
                builder.store(emit.load(address, emit.vector), variable)
        tile.multiply(x, x_stride, w, w_stride, panel_stride, depth)
        for variable, address in tile.outputs(out, out_stride):
            emit.store(builder.load(variable), address)


_tile = vector_function(_emit_tiles)


@device
def multiply_tile(x, x_row, w, w_panel, depth, out, out_row, rows, panels, accumulate):
    """One tile of a product of contiguous arrays of 4-byte elements.

    x_row and out_row are (flat index of the first row, stride of rows); w_panel is (flat index of the first
    panel, stride of steps of depth, stride of panels). rows is at most MAX_TILE_ROWS; panels is 1, or 2 for
    at most MAX_TWO_PANEL_ROWS; accumulate is 1 to add to out. The dtypes of x and w say what is multiplied:
    float32, float32: depth counts k.
    float32, uint32: a word of w holds two bfloat16, the even k in the low half; depth counts words.
    uint32, uint32: x holds such words too; AVX512_BF16 has an instruction for it.
    """
    x_at, x_stride = x_row
    w_at, w_stride, panel_stride = w_panel
    out_at, out_stride = out_row
    _tile(
        x, x_at, x_stride, w, w_at, w_stride, panel_stride, depth, out, out_at, out_stride, rows, panels,
        accumulate,
    )  # fmt: skip


@inlined
def multiply_rows(x, x_row, num_rows, w, w_panel, depth, out, out_row, panels, accumulate):
    """`multiply_tile` for any number of rows, in tiles of nearly equal heights."""
    x_at, x_stride = x_row
    w_at, w_stride, panel_stride = w_panel
    out_at, out_stride = out_row
    # int64 throughout: numba would compile the tile anew for each constant.
    panel = (np.int64(w_at), np.int64(w_stride), np.int64(panel_stride))
    num_blocks = -(-num_rows // MAX_TILE_ROWS)
    for block in range(num_blocks):
        row = block * num_rows // num_blocks
        rows = np.int64((block + 1) * num_rows // num_blocks - row)
        first = (np.int64(x_at + row * x_stride), np.int64(x_stride))
        target = (np.int64(out_at + row * out_stride), np.int64(out_stride))
        multiply_tile(
            x, first, w, panel, np.int64(depth), out, target, rows, np.int64(panels), np.int64(accumulate)
        )
