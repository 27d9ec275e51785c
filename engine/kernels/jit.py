"""How the CPU kernels are compiled, and run by several threads.

Entry points (`kernel`, `parallel_kernel`) are cached on disk beside the sources; what they call (`device`,
`inlined`) is compiled into them. numba's cache looks only at the file of the entry point, while a kernel here
spans several files, so the entries carry the hash of all sources of the package.

`run_team` is what `prange` would be: it hands one function to numba's threads, without the analysis that
makes parallel loops slow to compile.
"""

from collections.abc import Callable
from functools import cache, wraps
from hashlib import sha256
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import config, njit, types
from numba.core import cgutils
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.extending import intrinsic, overload
from numba.np.arrayobj import make_array
from numba.np.ufunc.parallel import _launch_threads

from engine.kernels.simd import HAS_AMX

NUM_THREADS: int = config.NUMBA_NUM_THREADS
# Sums may be reordered (that is what vectorises them); infinities and NaN keep their meaning.
_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
}
_POINTER, _SIZE = ir.IntType(8).as_pointer(), ir.IntType(64)
_NO_WRAPPERS = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


@cache
def _source_stamp() -> tuple[str, int, bool]:
    """What compiled code depends on, besides what numba's own cache looks at."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return sha256(b"".join(path.read_bytes() for path in sources)).hexdigest(), NUM_THREADS, HAS_AMX


class _PackageCache(FunctionCache):  # type: ignore[misc]
    """Files named by the stamp: those of other sources, whose types may no longer exist, are never opened."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        stamp = _source_stamp()
        base = f"{self._impl.filename_base}-{sha256(repr(stamp).encode()).hexdigest()[:12]}"
        self._cache_file = IndexDataCacheFile(self._cache_path, base, stamp)


def device(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that only kernels call."""
    return njit(**_OPTIONS, **_NO_WRAPPERS)(function)  # type: ignore[no-any-return]


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """A part of the device function that calls it: quicker to compile than a function of its own."""
    return njit(**_OPTIONS, **_NO_WRAPPERS, inline="always")(function)  # type: ignore[no-any-return]


def by_type(choose: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    """A function for kernels whose body depends on its arguments' types: `choose` takes the types and returns
    the body, a function of the same parameters."""

    @wraps(choose)
    def function(*_: Any) -> None:
        raise TypeError(f"{choose.__name__} is called from kernels only")

    overload(function)(choose)
    return function


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """An entry point."""
    dispatcher = njit(**_OPTIONS)(function)
    dispatcher._cache = _PackageCache(function)
    return dispatcher  # type: ignore[no-any-return]


def parallel_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """An entry point that calls `run_team`."""
    dispatcher = kernel(function)

    @wraps(function)
    def call(*args: Any) -> None:
        _launch_threads()
        dispatcher(*args)

    return call


@intrinsic
def borrowed(typing_context: Any, value: types.Type) -> Any:
    """The arrays of an array or tuple without their owner, which is not to be let go before `keep(value)`:
    references to them are not counted, at every slice and attribute."""
    del typing_context

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return _borrowed(context, builder, signature.args[0], values[0])

    return value(value), generate


@intrinsic
def keep(typing_context: Any, value: types.Type) -> Any:
    """Keeps a value until here."""
    del typing_context
    return types.void(value), lambda context, builder, signature, values: context.get_dummy_value()


@intrinsic
def run_team(typing_context: Any, worker: types.Dispatcher, args: types.BaseTuple) -> Any:
    """Calls worker(thread, *args) on each of numba's threads, numbered from 0, and returns when all calls
    have.

    worker is a device function that returns nothing; an exception in it is lost.
    """
    worker_signature = worker.get_call_type(typing_context, (types.int64, *args.types), {})

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        thread_main = _emit_thread_main(context, builder, worker, worker_signature, values[1].type)
        get_num_threads = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_SIZE, []), "get_num_threads"
        )
        num_threads = builder.call(get_num_threads, [])
        # Two "arrays", of which each thread gets a share: the arguments, which do not move from thread to
        # thread, and the thread's number, an address that moves by one.
        arguments = cgutils.alloca_once_value(builder, values[1])
        arrays = [builder.bitcast(arguments, _POINTER), cgutils.get_null_value(_POINTER)]
        array_table = cgutils.alloca_once_value(builder, cgutils.pack_array(builder, arrays))
        steps = cgutils.alloca_once_value(builder, cgutils.pack_array(builder, [_SIZE(0), _SIZE(1)]))
        num_shares = cgutils.alloca_once_value(builder, num_threads)
        pointers = [thread_main, array_table, num_shares, steps, cgutils.get_null_value(_POINTER)]
        kind = ir.FunctionType(ir.VoidType(), [_POINTER] * 5 + [_SIZE] * 3)
        parallel_for = cgutils.get_or_insert_function(builder.module, kind, "numba_parallel_for")
        numbers = [_SIZE(0), _SIZE(len(arrays)), num_threads]
        builder.call(parallel_for, [builder.bitcast(pointer, _POINTER) for pointer in pointers] + numbers)
        return context.get_dummy_value()

    return types.void(worker, args), generate


def _borrowed(context: Any, builder: Any, kind: types.Type, value: Any) -> Any:
    """A value whose arrays have no owner. Counting references to what all threads use would have them wait
    for each other at every slice; the caller holds them all until the team is done."""
    if isinstance(kind, types.Array):
        array = make_array(kind)(context, builder, value)
        array.meminfo = cgutils.get_null_value(array.meminfo.type)
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        for index, part in enumerate(kind):
            item = _borrowed(context, builder, part, builder.extract_value(value, index))
            value = builder.insert_value(value, item, index)
    return value


def _emit_thread_main(
    context: Any, builder: Any, worker: Any, signature: Any, arguments_type: ir.Type
) -> Any:
    """What numba's threads call, as a generalised ufunc: void(char **arrays, intp *shares, intp *steps, void
    *data)."""
    sizes = _SIZE.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [_POINTER.as_pointer(), sizes, sizes, _POINTER])
    function = ir.Function(builder.module, kind, builder.module.get_unique_name("thread_main"))
    function.linkage = "internal"
    inner = ir.IRBuilder(function.append_basic_block("entry"))
    arrays = [inner.load(inner.gep(function.args[0], [_SIZE(index)])) for index in (0, 1)]
    arguments = inner.load(inner.bitcast(arrays[0], arguments_type.as_pointer()))
    thread = inner.ptrtoint(arrays[1], _SIZE)
    compiled = worker.dispatcher.get_compile_result(signature)
    context.add_linking_libs([compiled.library])
    callee = context.declare_function(builder.module, compiled.fndesc)
    unpacked = [
        _borrowed(context, inner, kind, inner.extract_value(arguments, index))
        for index, kind in enumerate(signature.args[1:])
    ]
    context.call_conv.call_function(inner, callee, signature.return_type, signature.args, [thread, *unpacked])
    inner.ret_void()
    return function
