"""Functions for kernels, made of emitted vector code."""

import inspect
from collections.abc import Callable
from typing import Any

from numba import types
from numba.core.errors import TypingError
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from engine.kernels.simd import F32, I64, Emitter, Value, element_bytes, element_kind


def vector_function(emit_body: Callable[..., Value | None], result: types.Type = types.void) -> Any:
    """A function for kernels, emitted by `emit_body(emit, dtypes, *values)`.

    An array argument (contiguous) arrives as the address of its first element, and its dtype in `dtypes`; a
    float arrives as float32, a bool as i1, any other number as i64.
    """

    def function(_: Any, *args: Any) -> Any:
        signature = result(*[_argument_type(arg) for arg in args])
        dtypes = [arg.dtype for arg in args if isinstance(arg, types.Array)]

        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Value:
            arguments = zip(signature.args, values, strict=True)
            body = emit_body(
                Emitter(builder), dtypes, *[_value(context, builder, *pair) for pair in arguments]
            )
            return context.get_dummy_value() if body is None else body

        return signature, generate

    # numba wants the arguments by name.
    own, *_ = inspect.signature(function).parameters.values()
    _, _, *parameters = inspect.signature(emit_body).parameters.values()
    function.__signature__ = inspect.Signature([own, *parameters])  # type: ignore[attr-defined]
    return intrinsic(function)


def _argument_type(kind: Any) -> Any:
    if isinstance(kind, types.Array) and kind.layout != "C":
        raise TypingError("a kernel's arrays must be contiguous")
    if isinstance(kind, types.Array | types.Boolean):
        return kind
    return types.float32 if isinstance(kind, types.Float) else types.int64


def _value(context: Any, builder: Any, kind: Any, value: Value) -> Value:
    if not isinstance(kind, types.Array):
        return value
    return builder.ptrtoint(make_array(kind)(context, builder, value).data, I64)


def _emit_load_float(emit: Emitter, dtypes: list[Any], array: Value, index: Value) -> Value:
    kind = element_kind(dtypes[0])
    return emit.load_element(emit.offset(array, (index, element_bytes(kind))), kind, F32)


def _emit_store_float(emit: Emitter, dtypes: list[Any], array: Value, index: Value, value: Value) -> None:
    kind = element_kind(dtypes[0])
    emit.store_element(value, emit.offset(array, (index, element_bytes(kind))), kind)


def _emit_exp2(emit: Emitter, _: list[Any], x: Value) -> Value:
    return emit.exp2(x)


# Scalars; loops over them vectorise. load_float(array, index): an element of a float32, bfloat16 (uint16) or
# float16 (int16) array by its flat index; store_float(array, index, value): the reverse, rounding to nearest
# even; exp2(x) saturates at 2^±126.
load_float = vector_function(_emit_load_float, types.float32)
store_float = vector_function(_emit_store_float)
exp2 = vector_function(_emit_exp2, types.float32)
