"""A kernel says in its annotations what its parameters are; compiler and launcher read them there.

    def kernel(x: Float32s, out: Elements, width: Int, scale: Float) -> None: ...

Arrays are plain device pointers, indexed flat. `Elements` has the type the model computes in; numpy and
numba have no bfloat16, so 2-byte elements travel as uint16.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

Element = Literal["float32", "bfloat16", "float16"]
Kernel = Callable[..., None]


# Not tuples: those of equal strings would be equal, and some versions of `typing` take one for the other.
@dataclass(frozen=True)
class Pointer:
    element: str  # a numba type, or "element"


@dataclass(frozen=True)
class Scalar:
    type: str


Elements = Annotated[Any, Pointer("element")]
Float32s = Annotated[Any, Pointer("float32")]
Int32s = Annotated[Any, Pointer("int32")]
Int64s = Annotated[Any, Pointer("int64")]
UInt64s = Annotated[Any, Pointer("uint64")]
Words = Annotated[Any, Pointer("uint32")]  # any bytes, in units of 4
Int = Annotated[Any, Scalar("int32")]
Long = Annotated[Any, Scalar("int64")]
Float = Annotated[Any, Scalar("float32")]


def parameters(kernel: Kernel) -> tuple[Pointer | Scalar, ...]:
    annotations = {name: hint for name, hint in kernel.__annotations__.items() if name != "return"}
    return tuple(hint.__metadata__[0] for hint in annotations.values())


def storage(element: Element) -> str:
    """The numba type an element is stored as."""
    return "float32" if element == "float32" else "uint16"
