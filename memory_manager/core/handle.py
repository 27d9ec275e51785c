"""How a pool gets from Python into a kernel: by one pointer, instead of one argument check per array."""

from typing import Any

from numba import types
from numba.experimental import structref

from memory_manager.core.jit import kernel
from memory_manager.core.layout import Pool


@structref.register
class _PoolHandleType(types.StructRef):  # type: ignore[misc]
    pass


class PoolHandle(structref.StructRefProxy):  # type: ignore[misc]
    """Has one field for kernels to read: `pool`."""

    def __new__(cls, pool: Pool) -> "PoolHandle":
        return new_handle(pool)  # type: ignore[no-any-return]


structref.define_proxy(PoolHandle, _PoolHandleType, ["pool"])


@kernel
def new_handle(pool: Pool) -> Any:
    return PoolHandle(pool)
