# mypy: allow-untyped-defs, allow-untyped-calls
"""The processor's matrix registers (Intel AMX), and products of bfloat16 in them.

Eight registers hold 16 rows of 64 bytes each. One instruction adds the product of 16 rows of 16 pairs and 16
pairs of 16 columns to 16 x 16 sums, so 32 rows of x meet a panel of 32 columns in four registers of sums.
"""

from typing import Any

from llvmlite import ir

from engine.kernels.jit import inlined
from engine.kernels.simd import I8, I64, Emitter, Value
from engine.kernels.vector_function import vector_function

SIDE = 16  # rows and 32-bit columns of a register
_PANEL = 2 * SIDE  # columns, as `tile.PANEL` is where there are such registers
MAX_ROWS = 2 * SIDE
_STEPS_AHEAD = 8  # of depth, that w is brought near


# The registers: sums of the upper and the lower 16 rows, rows of x, columns of w.
_SUMS, _X, _W = ((0, 1), (2, 3)), (4, 5), (6, 7)


class Registers:
    """Emits instructions on the registers, which LLVM knows by number."""

    def __init__(self, emit: Emitter) -> None:
        self.emit = emit

    def configure(self, rows: dict[int, Value], widths: dict[int, int] | None = None) -> None:
        """Clears all registers. `rows` of each that is used, 1 to 16; `widths`: bytes of a row, if not 64."""
        emit, builder = self.emit, self.emit.builder
        widths = {tile: 64 if tile in rows else 0 for tile in range(8)} | (widths or {})
        packed = [sum(widths[first + i] << 16 * i for i in range(4)) for first in (0, 4)]
        packed_rows = emit.offset(I64(0), *((count, 1 << 8 * tile) for tile, count in rows.items()))
        words = [I64(1), I64(0), *map(I64, packed), I64(0), I64(0), packed_rows, I64(0)]
        with builder.goto_entry_block():
            table = builder.alloca(ir.ArrayType(I64, len(words)))
        address = builder.ptrtoint(table, I64)
        for index, word in enumerate(words):
            emit.store(word, emit.offset(address, 8 * index))
        self._call("ldtilecfg", self._pointer(address))

    def release(self) -> None:
        self._call("tilerelease")

    def zero(self, tile: int) -> None:
        self._call("tilezero", I8(tile))

    def load(self, tile: int, address: Value, stride: Value) -> None:
        self._call("tileloadd64", I8(tile), self._pointer(address), stride)

    def store(self, tile: int, address: Value, stride: Value) -> None:
        self._call("tilestored64", I8(tile), self._pointer(address), stride)

    def add_product(self, sums: int, x: int, w: int) -> None:
        """Of pairs of bfloat16, to float32."""
        self._call("tdpbf16ps", I8(sums), I8(x), I8(w))

    def add_product_int8(self, sums: int, x: int, w: int) -> None:
        """Of runs of four 8-bit numbers, to 32 bits."""
        self._call("tdpbssd", I8(sums), I8(x), I8(w))

    def _pointer(self, address: Value) -> Value:
        return self.emit.builder.inttoptr(address, I8.as_pointer())

    def _call(self, name: str, *args: Value) -> None:
        self.emit.call(f"llvm.x86.{name}", ir.VoidType(), args)


def _emit_block(
    emit: Emitter, _: list[Any], x: Value, x_at: Value, x_stride: Value, w: Value, w_at: Value,
    w_stride: Value, panel_stride: Value, ahead: Value, depth: Value, out: Value, out_at: Value,
    out_stride: Value, rows: Value, panels: Value, accumulate: Value,
) -> None:  # fmt: skip
    builder = emit.builder
    x, w, out = (emit.offset(array, (at, 4)) for array, at in ((x, x_at), (w, w_at), (out, out_at)))
    strides = [builder.shl(stride, I64(2)) for stride in (x_stride, w_stride, out_stride)]
    registers = Registers(emit)
    both = builder.icmp_signed(">", rows, I64(SIDE))
    upper = builder.select(both, I64(SIDE), rows)
    lower = builder.select(both, builder.sub(rows, I64(SIDE)), I64(1))
    rows_of_tiles = dict.fromkeys((*_SUMS[0], _X[0]), upper) | dict.fromkeys((*_SUMS[1], _X[1]), lower)
    registers.configure(rows_of_tiles | dict.fromkeys(_W, I64(SIDE)))
    with emit.loop(panels) as panel:
        panel_w = emit.offset(w, (builder.mul(panel, panel_stride), 4))
        addresses = x, panel_w, emit.offset(out, (panel, 4 * _PANEL))
        with builder.if_else(both) as (then, otherwise):
            for branch, halves in ((then, (0, 1)), (otherwise, (0,))):
                with branch:
                    _emit_halves(registers, halves, addresses, strides, ahead, depth, accumulate)
    registers.release()


def _emit_halves(
    registers: Registers, halves: tuple[int, ...], addresses: tuple[Value, ...], strides: list[Value],
    ahead: Value, depth: Value, accumulate: Value,
) -> None:  # fmt: skip
    emit, builder = registers.emit, registers.emit.builder
    x, w, out = addresses
    x_stride, w_stride, out_stride = strides
    targets = [
        (_SUMS[half][column], emit.offset(out, (out_stride, SIDE * half), 4 * SIDE * column))
        for half in halves
        for column in (0, 1)
    ]
    with builder.if_else(builder.icmp_signed("!=", accumulate, I64(0))) as (then, otherwise):
        with then:
            for tile, address in targets:
                registers.load(tile, address, out_stride)
        with otherwise:
            for tile, _ in targets:
                registers.zero(tile)
    with emit.loop(builder.udiv(depth, I64(SIDE))) as step:
        start = emit.offset(w, (builder.mul(step, w_stride), SIDE))
        with builder.if_then(builder.icmp_signed("!=", ahead, I64(0))):
            for line in range(2 * SIDE):
                emit.prefetch(emit.offset(start, ahead, 64 * line))
        for column, tile in enumerate(_W):
            registers.load(tile, emit.offset(start, 4 * SIDE * column), w_stride)
        for half in halves:
            registers.load(_X[half], emit.offset(x, (x_stride, SIDE * half), (step, 4 * SIDE)), x_stride)
            for column, tile in enumerate(_W):
                registers.add_product(_SUMS[half][column], _X[half], tile)
    for tile, address in targets:
        registers.store(tile, address, out_stride)


_block = vector_function(_emit_block)


@inlined
def multiply_words(x, x_row, num_rows, w, w_panel, depth, out, out_row, panels, accumulate):
    """`multiply_rows` for uint32 words of both operands, any number of panels; depth, in words, is a multiple
    of `SIDE`."""
    x_at, x_stride = x_row
    w_at, w_stride, panel_stride = w_panel
    out_at, out_stride = out_row
    for row in range(0, num_rows, MAX_ROWS):
        # Later rows find the panels near, as they do short ones, which were made just now.
        from_afar = row == 0 and depth > _STEPS_AHEAD * SIDE
        ahead = 4 * _STEPS_AHEAD * SIDE * w_stride if from_afar else 0
        _block(
            x, x_at + row * x_stride, x_stride, w, w_at, w_stride, panel_stride, ahead, depth, out,
            out_at + row * out_stride, out_stride, min(MAX_ROWS, num_rows - row), panels, accumulate,
        )  # fmt: skip
