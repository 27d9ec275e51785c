"""Columns: the numpy arrays that requests and answers are made of.

Sequence ids are int64[n], everything else is int32. Arrays of a request must be one-dimensional and
contiguous; they become read-only, because the last request is kept to recognise its repeat.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from memory_manager.errors import InvalidRequestError

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

INT32 = np.dtype(np.int32)
INT64 = np.dtype(np.int64)

# numpy's flag bits of a read-only, aligned array that is contiguous (both orders, being one-dimensional).
_FROZEN_FLAGS = 0x101 | 0x2
_OWNS_DATA_FLAG = 0x4
WRITEABLE_FLAG = 0x400


def freeze(array: npt.NDArray[Any], dtype: np.dtype[Any], name: str) -> None:
    """Makes a column read-only. Raises InvalidRequestError / BAD_ARRAY for another type or layout."""
    if array.dtype is not dtype or array.ndim != 1:
        raise InvalidRequestError("BAD_ARRAY", f"{name} must be a one-dimensional array of {dtype}")
    if array.flags.num & ~_OWNS_DATA_FLAG != _FROZEN_FLAGS:
        array.setflags(write=False)
        if array.flags.num & ~_OWNS_DATA_FLAG != _FROZEN_FLAGS:
            raise InvalidRequestError("BAD_ARRAY", f"{name} must be contiguous and aligned")


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.setflags(write=False)
    return array


NO_INT32S: Int32s = _frozen(np.empty(0, np.int32))
NO_INT64S: Int64s = _frozen(np.empty(0, np.int64))
