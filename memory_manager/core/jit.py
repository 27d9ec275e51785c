"""How the core is compiled: without the GIL, with numpy's arithmetic, cached on disk."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import njit, types

F = TypeVar("F", bound=Callable[..., Any])


def _sources_stamp() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_STAMP = _sources_stamp()


class ArgumentTypesError(TypeError):
    """A kernel was given arrays of other types than it is for."""


def kernel(function: F) -> F:
    """For functions that are called from Python. Compiles on first use (see warm_up.py), and only once.

    numba trusts a cached function as long as its own file is unchanged, although callees from other files
    are compiled into it. Here the stamp is that of all the core's sources.
    """
    dispatcher = njit(nogil=True, cache=True, error_model="numpy")(function)
    dispatcher._cache._cache_file._source_stamp = _STAMP
    compile_anything = dispatcher.compile

    def compile_once(argument_types: Any) -> Any:
        if dispatcher.signatures:
            raise ArgumentTypesError(f"{function.__name__} takes no arguments of types {argument_types}")
        return compile_anything(argument_types)

    dispatcher.compile = compile_once
    return dispatcher  # type: ignore[no-any-return]


def inner(function: F) -> F:
    """For functions that only kernels call: no wrapper is compiled, so Python must not call them.

    Integers (block ids, counts, hashes) are passed as int64, whatever the caller has, so that a function
    is compiled once and not for every mixture of int32, uint32 and int64.
    """
    dispatcher = njit(nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)(
        function
    )
    compile_exactly = dispatcher.compile
    dispatcher.compile = lambda argument_types: compile_exactly(tuple(map(_widened, argument_types)))
    return dispatcher  # type: ignore[no-any-return]


def _widened(argument_type: types.Type) -> types.Type:
    is_narrow = isinstance(argument_type, types.Integer) and argument_type.bitwidth < 64
    return types.int64 if is_narrow or isinstance(argument_type, types.IntegerLiteral) else argument_type
