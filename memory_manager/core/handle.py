"""How a pool's arrays get into the kernels: through a table of their addresses.

Inside kernels a pool is one pointer to that table, and `pool.nodes` is an array made from the table's
entry on the spot. Passing all arrays as arguments instead would cost a microsecond and more per call, and
a multiple of the time to compile.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.core import cgutils
from numba.core.datamodel import models, register_default
from numba.core.imputils import impl_ret_untracked, lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from memory_manager.core.layout import POOL_DTYPES, Array, Pool


def address_table(pool: Pool) -> Array:
    """int64[2 F]: address and size of each of the F arrays. Valid as long as these arrays live."""
    return np.array([entry for array in pool for entry in (array.ctypes.data, array.size)], np.int64)


class _PoolType(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="Pool")


_POOL = _PoolType()
_FIELDS = list(POOL_DTYPES)
_ARRAY_TYPES = {name: types.Array(from_dtype(dtype), 1, "C") for name, dtype in POOL_DTYPES.items()}


@register_default(_PoolType)
class _PoolModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, cgutils.intp_t.as_pointer())


@intrinsic
def open_pool(typing_context: Any, table: Any) -> Any:
    """The pool whose arrays the table (int64[2 F]) names."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, arguments[0]).data

    return _POOL(table), generate


@infer_getattr
class _PoolAttributes(AttributeTemplate):  # type: ignore[misc]
    key = _PoolType

    def generic_resolve(self, pool: Any, name: str) -> Any:
        return _ARRAY_TYPES.get(name)


@lower_getattr_generic(_PoolType)
def _get_array(context: Any, builder: Any, pool_type: Any, table: Any, name: str) -> Any:
    array_type = _ARRAY_TYPES[name]
    index = 2 * _FIELDS.index(name)
    int64 = cgutils.intp_t
    address = builder.load(builder.gep(table, [ir.Constant(int64, index)]))
    size = builder.load(builder.gep(table, [ir.Constant(int64, index + 1)]))
    array = context.make_array(array_type)(context, builder)
    itemsize = ir.Constant(int64, context.get_abi_sizeof(context.get_data_type(array_type.dtype)))
    populate_array(
        array,
        data=builder.inttoptr(address, array.data.type),
        shape=[size],
        strides=[itemsize],
        itemsize=itemsize,
        meminfo=None,
    )
    return impl_ret_untracked(context, builder, array_type, array._getvalue())
