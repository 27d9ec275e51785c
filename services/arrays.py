"""Arrays as they travel: bytes, little endian, without padding."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Ints = Sequence[int] | Int32 | Int64


def pack_int32(values: Ints) -> bytes:
    return np.asarray(values, "<i4").tobytes()


def pack_int64(values: Ints) -> bytes:
    return np.asarray(values, "<i8").tobytes()


def pack_float32(values: Float32) -> bytes:
    return values.astype("<f4", copy=False).tobytes()


def unpack_int32(data: bytes) -> Int32:
    """A read-only view. Raises ValueError when the length is no multiple of 4."""
    return np.frombuffer(data, "<i4")


def unpack_int64(data: bytes) -> Int64:
    """A read-only view. Raises ValueError when the length is no multiple of 8."""
    return np.frombuffer(data, "<i8")
