"""A hint to the processor: fetch this cache line, it will be needed soon."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """prefetch(array, index) of a one-dimensional contiguous array; reads nothing, cannot fault."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array_type, index_type = signature.args
        data = context.make_array(array_type)(context, builder, arguments[0]).data
        offset = context.cast(builder, arguments[1], index_type, types.intp)
        address = builder.bitcast(builder.gep(data, [offset]), cgutils.voidptr_t)
        int32 = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, int32, int32, int32])
        function = cgutils.get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0")
        read, keep, data_cache = int32(0), int32(3), int32(1)
        builder.call(function, [address, read, keep, data_cache])
        return context.get_dummy_value()

    return types.void(array, index), generate
