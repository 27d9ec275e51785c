"""Vector code for numba kernels, written as LLVM IR through llvmlite.

numba vectorises plain loops, but not the register tiles that matrix products and attention live on. `Emitter`
is the little language those are written in: float32 vectors of `LANES` lanes, addresses as 64-bit integers,
offsets in bytes. LLVM lowers a vector that is wider than the machine's registers, so the same code is right
everywhere and fast where `LANES` fits.
"""

import ctypes
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import llvmlite.binding
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.core import cgutils

CPU_FEATURES = llvmlite.binding.get_host_cpu_features()
LANES = 16 if CPU_FEATURES.get("avx512f") else 8
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18


def _lent_matrix_registers() -> bool:
    """Linux lends a process the registers when it asks."""
    if (
        not all(map(CPU_FEATURES.get, ("amx-bf16", "amx-int8")))
        or sys.platform != "linux"
        or platform.machine() != "x86_64"
    ):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA) == 0)


HAS_AMX = _lent_matrix_registers()

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
Value = Any  # an LLVM value

Float32 = npt.NDArray[np.float32]
Int32 = npt.NDArray[np.int32]
Cache = npt.NDArray[np.float32] | npt.NDArray[np.uint16] | npt.NDArray[np.float16]  # uint16: bfloat16 bits

# 2^f for |f| <= 1/2, relative error 2e-9 (Remez), lowest power first.
_EXP2_COEFFICIENTS = (
    1.0,
    0.6931472057,
    0.2402264689,
    0.05550328777,
    0.009618488957,
    0.001339993122,
    0.0001534581202,
)
_EXP2_LIMIT = 126.0  # 2^±126 are normal numbers


def float_bits(array: Cache) -> npt.NDArray[Any]:
    """The array as kernels take it: numba has no float16 on a CPU, so its bits travel as int16, as bfloat16's
    do as uint16."""
    return array.view(np.int16) if array.dtype == np.float16 else array


def element_kind(dtype: types.Type) -> str:
    """What an array of this numba dtype holds."""
    return {types.float32: "float32", types.uint16: "bfloat16", types.int16: "float16"}[dtype]


def element_bytes(kind: str) -> int:
    return 4 if kind == "float32" else 2


def spread(kind: ir.Type, constant: float) -> Value:
    """A constant of a scalar type, or in every lane of a vector type."""
    return ir.Constant(kind, [constant] * kind.count if isinstance(kind, ir.VectorType) else constant)


def like(kind: ir.Type, element: ir.Type) -> ir.Type:
    """The type with the shape of `kind` and another element."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


class _LoopId(ir.MDValue):  # type: ignore[misc]
    """Metadata that keeps LLVM from unrolling a loop; such a node names itself, for which llvmlite has no
    form."""

    def __init__(self, module: ir.Module) -> None:
        super().__init__(
            module, [module.add_metadata(["llvm.loop.unroll.disable"])], str(len(module.metadata))
        )

    def descr(self, buffer: list[str]) -> None:
        (disable,) = self.operands
        buffer += (f"distinct !{{ {self.get_reference()}, {disable.get_reference()} }}", "\n")


class Emitter:
    """Emits code at a builder. Arithmetic takes vectors or scalars; an address is an i64 value."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        self.vector = ir.VectorType(F32, LANES)
        self.int_vector = ir.VectorType(I32, LANES)

    # Memory

    def offset(self, address: Value, *terms: int | Value | tuple[Value, int]) -> Value:
        """address + sum of terms; a term is a number, a value, or a (value, factor) pair."""
        for term in terms:
            if isinstance(term, tuple):
                term = self.builder.mul(term[0], I64(term[1]))
            elif isinstance(term, int):
                term = I64(term)
            address = self.builder.add(address, term)
        return address

    def load(self, address: Value, kind: ir.Type, align: int = 4) -> Value:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align, typ=kind)

    def store(self, value: Value, address: Value, align: int = 4) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=align)

    def load_element(self, address: Value, element: str, kind: ir.Type) -> Value:
        """Numbers of kind "float32", "bfloat16" or "float16" in memory, as float32: one, or a vector of
        them."""
        if element == "float32":
            return self.load(address, kind)
        if element == "float16":
            return self.builder.fpext(self.load(address, like(kind, F16), align=2), kind)
        bits = self.builder.zext(self.load(address, like(kind, I16), align=2), like(kind, I32))
        return self.low_bfloat16(bits)

    def store_element(self, value: Value, address: Value, element: str) -> None:
        """The reverse of `load_element`, rounding to nearest even."""
        if element == "float32":
            self.store(value, address)
        elif element == "float16":
            self.store(self.builder.fptrunc(value, like(value.type, F16)), address, align=2)
        else:
            bits = self.builder.trunc(self.bfloat16_bits(value), like(value.type, I16))
            self.store(bits, address, align=2)

    def prefetch(self, address: Value) -> None:
        """Brings a line of memory near; harmless past the end of an array."""
        pointer = self.builder.inttoptr(address, I8.as_pointer())
        self.call("llvm.prefetch.p0", ir.VoidType(), [pointer, I32(0), I32(3), I32(1)])

    # Arithmetic

    def low_bfloat16(self, words: Value) -> Value:
        """The bfloat16 in the low half of each 32-bit word."""
        return self.builder.bitcast(self.builder.shl(words, spread(words.type, 16)), like(words.type, F32))

    def high_bfloat16(self, words: Value) -> Value:
        return self.builder.bitcast(
            self.builder.and_(words, spread(words.type, 0xFFFF0000)), like(words.type, F32)
        )

    def bfloat16_bits(self, value: Value) -> Value:
        """Bits of the nearest bfloat16 (ties to even), in the low half of a 32-bit word."""
        builder = self.builder
        bits = builder.bitcast(value, like(value.type, I32))
        sixteen = spread(bits.type, 16)
        odd = builder.and_(builder.lshr(bits, sixteen), spread(bits.type, 1))
        return builder.lshr(builder.add(builder.add(bits, spread(bits.type, 0x7FFF)), odd), sixteen)

    def splat(self, scalar: Value) -> Value:
        """A scalar in every lane."""
        undefined = ir.Constant(ir.VectorType(scalar.type, LANES), ir.Undefined)
        single = self.builder.insert_element(undefined, scalar, I32(0))
        return self.builder.shuffle_vector(single, undefined, ir.Constant(self.int_vector, [0] * LANES))

    def shuffle(self, a: Value, b: Value, lanes: Sequence[int]) -> Value:
        """Lanes of a, then of b, by number."""
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes)))

    def multiply_add(self, a: Value, b: Value, c: Value) -> Value:
        """a·b + c, fused where the machine can."""
        return self.call(f"llvm.fmuladd.{_suffix(a.type)}", a.type, [a, b, c])

    def maximum(self, a: Value, b: Value) -> Value:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def absolute(self, x: Value) -> Value:
        return self.call(f"llvm.fabs.{_suffix(x.type)}", x.type, [x])

    def nearest(self, x: Value) -> Value:
        """The nearest whole number, ties to even."""
        return self.call(f"llvm.nearbyint.{_suffix(x.type)}", x.type, [x])

    def exp2(self, x: Value) -> Value:
        """2^x, saturating at 2^±126."""
        kind = x.type
        limit = spread(kind, _EXP2_LIMIT)
        x = self.maximum(x, spread(kind, -_EXP2_LIMIT))
        x = self.builder.select(self.builder.fcmp_ordered("<", x, limit), x, limit)
        whole = self.nearest(x)
        fraction = self.builder.fsub(x, whole)
        result = spread(kind, _EXP2_COEFFICIENTS[-1])
        for coefficient in reversed(_EXP2_COEFFICIENTS[:-1]):
            result = self.multiply_add(result, fraction, spread(kind, coefficient))
        exponent = self.builder.fptosi(whole, like(kind, I32))
        shifted = self.builder.shl(exponent, spread(exponent.type, 23))
        bits = self.builder.add(self.builder.bitcast(result, exponent.type), shifted)
        return self.builder.bitcast(bits, kind)

    def sum_lanes(self, vector: Value) -> Value:
        return self._fold(vector, self.builder.fadd)

    def max_lanes(self, vector: Value) -> Value:
        return self._fold(vector, self.maximum)

    def _fold(self, vector: Value, combine: Any) -> Value:
        while (count := vector.type.count) > 1:
            low = self.shuffle(vector, vector, range(count // 2))
            high = self.shuffle(vector, vector, range(count // 2, count))
            vector = combine(low, high)
        return self.builder.extract_element(vector, I32(0))

    # Control

    def call(self, name: str, result: ir.Type, args: Sequence[Value]) -> Value:
        kind = ir.FunctionType(result, [arg.type for arg in args])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), args)

    def variable(self, value: Value) -> Value:
        """A variable with a value now; LLVM keeps it in a register."""
        return cgutils.alloca_once_value(self.builder, value)

    @contextmanager
    def loop(self, count: Value) -> Iterator[Value]:
        """for index in range(count). LLVM leaves it as it is: unrolling what is unrolled here by hand only
        takes time."""
        with cgutils.for_range(self.builder, count) as loop:
            yield loop.index
            body = self.builder.basic_block
        body.terminator.set_metadata("llvm.loop", _LoopId(self.builder.module))

    def cases(self, number: Value, choices: Iterable[int]) -> Iterator[int]:
        """Code for each value that a number may have: `for choice in emit.cases(number, (1, 2)): ...` emits a
        switch."""
        end = self.builder.append_basic_block("end")
        switch = self.builder.switch(number, end)
        for choice in choices:
            block = self.builder.append_basic_block(f"case{choice}")
            switch.add_case(I64(choice), block)
            self.builder.position_at_end(block)
            yield choice
            self.builder.branch(end)
        self.builder.position_at_end(end)


def _suffix(kind: ir.Type) -> str:
    return f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
