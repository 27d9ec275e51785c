"""What kernels use beyond numba.cuda: wide loads, 2-byte floats, tensor cores; as LLVM IR and PTX.

Kernels get this module as an argument, so that a simulator can stand in for it. Everything exists from
sm_80 on. Indices are in elements of the pointer; wide accesses need an address aligned to their width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from llvmlite import ir
from numba.cuda import types
from numba.cuda.extending import intrinsic

from engine.kernels.cuda.parameters import Element

_F16, _F32 = ir.HalfType(), ir.FloatType()
_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_Value = Any  # an LLVM value


class Codec(NamedTuple):
    """Between an element as stored and its float32 value (rounding to nearest even)."""

    widen: Any  # stored -> float32
    narrow: Any  # float32 -> stored


class Matrix(NamedTuple):
    """Products of 2-byte elements on tensor cores.

    mma: one warp adds A [16, 16] · B [16, 8] to C [16, 8] in float32 (PTX m16n8k16; lane = 4g + c).
    (c0..c3, a0..a3, b0, b1) -> (c0..c3): c0, c1 are row g, columns 2c, 2c + 1; c2, c3 the same of row g + 8.
    a0 is row g, columns 2c, 2c + 1; a1 of row g + 8; a2, a3 the same eight columns further right. b0 is
    rows 2c, 2c + 1 of column g; b1 eight rows further down. A word holds two elements, the first one low.
    """

    mma: Any
    pack: Any  # (first, second) float32 -> word


def _asm(builder: Any, text: str, constraints: str, result: ir.Type, args: Sequence[_Value]) -> _Value:
    """PTX that stays where it is written: the order of loads is what hides their latency."""
    kind = ir.FunctionType(result, [arg.type for arg in args])
    assembly = ir.InlineAsm(kind, text, constraints, side_effect=True)
    return builder.call(assembly, list(args), attrs=("convergent",))


def _tuple_of(context: Any, builder: Any, kind: Any, struct: _Value) -> _Value:
    parts = [builder.extract_value(struct, i) for i in range(kind.count)]
    return context.make_tuple(builder, kind, parts)


def _address(builder: Any, pointer: _Value, index: _Value) -> _Value:
    return builder.ptrtoint(builder.gep(pointer, [index]), _I64)


def _loader(count: int, numba_type: Any, llvm_type: ir.Type, suffix: str, constraint: str) -> Any:
    result = types.UniTuple(numba_type, count)
    outputs = ", ".join(f"${i}" for i in range(count))
    text = f"ld.global.v{count}.{suffix} {{{outputs}}}, [${count}];"
    constraints = ",".join([f"={constraint}"] * count + ["l"])

    def load(typingctx: Any, pointer: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> _Value:
            struct = ir.LiteralStructType([llvm_type] * count)
            values = _asm(builder, text, constraints, struct, [_address(builder, *args)])
            return _tuple_of(context, builder, signature.return_type, values)

        return result(pointer, types.int64), generate

    return intrinsic(load)


load2 = _loader(2, types.uint32, _I32, "u32", "r")  # (pointer, index) -> two words
load4 = _loader(4, types.uint32, _I32, "u32", "r")  # four words
load4_float32 = _loader(4, types.float32, _F32, "f32", "f")


@intrinsic
def store4(typingctx: Any, pointer: Any, index: Any, w0: Any, w1: Any, w2: Any, w3: Any) -> Any:
    """Writes four words at pointer[index:]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> _Value:
        address = _address(builder, args[0], args[1])
        text = "st.global.v4.u32 [$0], {$1, $2, $3, $4};"
        _asm(builder, text, "l,r,r,r,r", ir.VoidType(), [address, *args[2:]])
        return context.get_dummy_value()

    word = types.uint32
    return types.void(pointer, types.int64, word, word, word, word), generate


@intrinsic
def exp2(typingctx: Any, x: Any) -> Any:
    """2^x, to about 2 units in the last place; 0 far below."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> _Value:
        return _asm(builder, "ex2.approx.ftz.f32 $0, $1;", "=f,f", _F32, args)

    return types.float32(types.float32), generate


@intrinsic
def low_halves(typingctx: Any, a: Any, b: Any) -> Any:
    """A word of the low 16 bits of a (low) and b (high)."""
    return types.uint32(types.uint32, types.uint32), _permute("0x5410")


@intrinsic
def high_halves(typingctx: Any, a: Any, b: Any) -> Any:
    """A word of the high 16 bits of a (low) and b (high)."""
    return types.uint32(types.uint32, types.uint32), _permute("0x7632")


def _permute(selector: str) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> _Value:
        return _asm(builder, f"prmt.b32 $0, $1, $2, {selector};", "=r,r,r", _I32, args)

    return generate


@intrinsic
def float_of_bits(typingctx: Any, bits: Any) -> Any:
    """The float32 with these bits (int32)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> _Value:
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), generate


@intrinsic
def _same(typingctx: Any, x: Any) -> Any:
    return types.float32(types.float32), lambda context, builder, signature, args: args[0]


@intrinsic
def _widen_bfloat16(typingctx: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> _Value:
        word = builder.shl(builder.zext(args[0], _I32), ir.Constant(_I32, 16))
        return builder.bitcast(word, _F32)

    return types.float32(types.uint16), generate


@intrinsic
def _narrow_bfloat16(typingctx: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> _Value:
        return _asm(builder, "cvt.rn.bf16.f32 $0, $1;", "=h,f", _I16, args)

    return types.uint16(types.float32), generate


@intrinsic
def _widen_float16(typingctx: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> _Value:
        return builder.fpext(builder.bitcast(args[0], _F16), _F32)

    return types.float32(types.uint16), generate


@intrinsic
def _narrow_float16(typingctx: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> _Value:
        return builder.bitcast(builder.fptrunc(args[0], _F16), _I16)

    return types.uint16(types.float32), generate


def _matrix(suffix: str) -> Matrix:
    def mma(
        typingctx: Any,
        c0: Any,
        c1: Any,
        c2: Any,
        c3: Any,
        a0: Any,
        a1: Any,
        a2: Any,
        a3: Any,
        b0: Any,
        b1: Any,
    ) -> Any:
        text = (
            f"mma.sync.aligned.m16n8k16.row.col.f32.{suffix}.{suffix}.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
        )
        constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> _Value:
            struct = ir.LiteralStructType([_F32] * 4)
            values = _asm(builder, text, constraints, struct, [*args[4:], *args[:4]])
            return _tuple_of(context, builder, signature.return_type, values)

        four = types.UniTuple(types.float32, 4)
        return four(*[types.float32] * 4, *[types.uint32] * 6), generate

    def pack(typingctx: Any, first: Any, second: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> _Value:
            text = f"cvt.rn.{suffix}x2.f32 $0, $1, $2;"  # the high half comes first
            return _asm(builder, text, "=r,f,f", _I32, [args[1], args[0]])

        return types.uint32(types.float32, types.float32), generate

    return Matrix(mma=intrinsic(mma), pack=intrinsic(pack))


CODECS: dict[Element, Codec] = {
    "float32": Codec(_same, _same),
    "bfloat16": Codec(_widen_bfloat16, _narrow_bfloat16),
    "float16": Codec(_widen_float16, _narrow_float16),
}
MATRICES: dict[Element, Matrix] = {"bfloat16": _matrix("bf16"), "float16": _matrix("f16")}
