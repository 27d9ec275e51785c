"""Kernels' Python sources in numba's CUDA simulator, on CPU tensors.

numba simulates what a kernel sees of a block. Here its threads are greenlets, which makes a barrier cheap,
and run forwards or backwards between barriers, which brings races to light. What numba's simulator lacks is
here too: what the lanes of a warp do together, and `engine.kernels.cuda.primitives`.
"""

import random
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from greenlet import getcurrent, greenlet
from numba.cuda.simulator.kernelapi import Dim3 as Index
from numba.cuda.simulator.kernelapi import FakeCUDAModule

from engine.kernels.cuda.catalog import CATALOG, KernelSpec
from engine.kernels.cuda.launcher import Argument, Dim3, Recorder, Recording
from engine.kernels.cuda.parameters import Pointer, Scalar, parameters, storage
from engine.kernels.cuda.plan import Tuning
from engine.kernels.cuda.primitives import Codec, Matrix

WARP = 32
Lanes = list[tuple[Any, ...]]
Collective = Callable[[Lanes], list[Any]]


TUNING = Tuning(page_warps=1, row_warps=1, min_split_tokens=16, max_splits=2, max_threads=32)


class SimulatorLauncher:
    name = "simulator"
    device = torch.device("cpu")

    def prepare(self, specs: Iterable[KernelSpec]) -> None:
        pass

    def launch(self, spec: KernelSpec, grid: Dim3, block: Dim3, *arguments: Argument) -> None:
        assert block[0] * block[1] * block[2] <= CATALOG[spec.name].max_threads
        order = random.Random(0)
        for index in np.ndindex(*grid):
            # A block sees a module of its own: its shared memory is in there.
            module = _Module(grid, block, 0)
            kernel = CATALOG[spec.name].factory(module, PRIMITIVES, spec.element, *spec.constants)
            wanted = parameters(kernel)
            values = [_value(p, spec, a) for p, a in zip(wanted, arguments, strict=True)]
            threads = [
                _Thread(kernel, values, Index(*index), Index(x, y, z))
                for z, y, x in np.ndindex(*reversed(block))
            ]
            with np.errstate(over="ignore"):
                _run(threads, order)

    def wait(self) -> None:
        pass

    def recorder(self) -> Recorder:
        def record(work: Callable[[], torch.Tensor]) -> Recording:
            result = work()

            def replay() -> None:
                result.copy_(work())

            return Recording(result, replay)

        return record

    def tuning(self, head_dim: int) -> Tuning:
        return TUNING

    def memory_bytes(self) -> tuple[int, int]:
        return 6_000_000, 10_000_000


class _Module(FakeCUDAModule):  # type: ignore[misc]
    """What a kernel knows as `cuda`."""

    @property
    def threadIdx(self) -> Index:
        return getcurrent().thread_index

    @property
    def blockIdx(self) -> Index:
        return getcurrent().block_index

    def syncthreads(self) -> None:
        _wait(_Barrier())

    def syncwarp(self) -> None:
        _wait(_Together(_nothing, ()))

    def shfl_xor_sync(self, members: int, value: Any, mask: int) -> Any:
        return _wait(_Together(_exchange, (value, mask)))

    def jit(self, **_: Any) -> Callable[[Any], Any]:
        return lambda function: function


class _Barrier:
    """A thread waits for its whole block."""


class _Together(NamedTuple):
    """A lane waits for its whole warp; then `function` computes for all."""

    function: Collective
    arguments: tuple[Any, ...]


class _Thread(greenlet):  # type: ignore[misc]
    def __init__(self, kernel: Callable[..., None], values: list[Any], block: Index, thread: Index) -> None:
        super().__init__(lambda _: kernel(*values))
        self.block_index, self.thread_index = block, thread
        self.waits_for: _Barrier | _Together | None = None
        self.answer: Any = None


def _wait(reason: _Barrier | _Together) -> Any:
    thread: Any = getcurrent()
    thread.waits_for = reason
    return thread.parent.switch()


def _run(threads: list[_Thread], order: random.Random) -> None:
    runnable = list(threads)
    while runnable:
        if order.random() < 0.5:
            runnable.reverse()
        for thread in runnable:
            thread.waits_for = None
            thread.switch(thread.answer)
        runnable = _released(threads)
    assert all(thread.dead for thread in threads), "threads wait for some that will never come"


def _released(threads: list[_Thread]) -> list[_Thread]:
    """Those whose wait is over: lanes of complete warps, else the block when all of it is at the barrier."""
    released: list[_Thread] = []
    for start in range(0, len(threads), WARP):
        lanes = threads[start : start + WARP]
        waits = [lane.waits_for for lane in lanes if isinstance(lane.waits_for, _Together)]
        if len(waits) == WARP:
            assert len({wait.function for wait in waits}) == 1, "lanes of a warp do different things"
            answers = waits[0].function([wait.arguments for wait in waits])
            for lane, answer in zip(lanes, answers, strict=True):
                lane.answer = answer
            released += lanes
    if released:
        return released
    alive = [thread for thread in threads if not thread.dead]
    return alive if all(isinstance(thread.waits_for, _Barrier) for thread in alive) else []


def _value(parameter: Pointer | Scalar, spec: KernelSpec, argument: Argument) -> Any:
    """A pointer is everything from the tensor's address to the end of its memory."""
    if isinstance(parameter, Scalar):
        assert not isinstance(argument, torch.Tensor)
        return np.dtype(parameter.type).type(argument)
    assert isinstance(argument, torch.Tensor)
    name = storage(spec.element) if parameter.element == "element" else parameter.element
    data = torch.empty(0, dtype=torch.uint8).set_(argument.untyped_storage()).numpy()
    return data[argument.storage_offset() * argument.element_size() :].view(name)


def _exchange(lanes: Lanes) -> list[Any]:
    return [lanes[lane ^ mask][0] for lane, (_, mask) in enumerate(lanes)]


def _nothing(lanes: Lanes) -> list[Any]:
    return [None] * WARP


def _float_bits(values: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    return np.asarray(values, np.float32).view(np.uint32)


def _widen_bfloat16(bits: npt.ArrayLike) -> Any:
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)[()]


def _narrow_bfloat16(value: npt.ArrayLike) -> Any:
    bits = _float_bits(value)
    return ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)[()]


def _widen_float16(bits: npt.ArrayLike) -> Any:
    return np.asarray(bits, np.uint16).view(np.float16).astype(np.float32)[()]


def _narrow_float16(value: npt.ArrayLike) -> Any:
    return np.asarray(value, np.float32).astype(np.float16).view(np.uint16)[()]


def _matrix(codec: Codec) -> Matrix:
    def halves(words: npt.ArrayLike) -> Any:
        """[..., 2] float32 of words [...]."""
        both = np.asarray(words, np.uint32)
        return codec.widen(np.stack([both & 0xFFFF, both >> 16], -1).astype(np.uint16))

    def product(lanes: Lanes) -> list[Any]:
        a, b, c = np.empty((16, 16), np.float32), np.empty((16, 8), np.float32), np.empty((16, 8), np.float32)
        for lane, words in enumerate(lanes):
            row, column = lane // 4, lane % 4 * 2
            c[row, column : column + 2], c[row + 8, column : column + 2] = words[:2], words[2:4]
            values = halves(words[4:])
            a[row, column : column + 2], a[row + 8, column : column + 2] = values[0], values[1]
            a[row, column + 8 : column + 10], a[row + 8, column + 8 : column + 10] = values[2], values[3]
            b[column : column + 2, row], b[column + 8 : column + 10, row] = values[4], values[5]
        c += a @ b
        return [
            (*c[lane // 4, lane % 4 * 2 :][:2], *c[lane // 4 + 8, lane % 4 * 2 :][:2]) for lane in range(WARP)
        ]

    def pack(first: Any, second: Any) -> Any:
        return np.uint32(codec.narrow(first)) | (np.uint32(codec.narrow(second)) << np.uint32(16))

    return Matrix(mma=lambda *words: _wait(_Together(product, words)), pack=pack)


def _load(count: int, dtype: type) -> Callable[[Any, int], tuple[Any, ...]]:
    def load(pointer: Any, index: int) -> tuple[Any, ...]:
        bytes_each = 4 * count
        start = int(index) * pointer.itemsize
        assert start % bytes_each == 0, "a wide access at an address it is not aligned to"
        values: Any = np.asarray(pointer).view(np.uint8)[start : start + bytes_each].view(dtype)
        assert len(values) == count, "a read past the end of memory"
        return tuple(values)

    return load


def _store4(pointer: Any, index: int, *words: Any) -> None:
    start = int(index) * pointer.itemsize
    assert start % 16 == 0, "a wide access at an address it is not aligned to"
    np.asarray(pointer).view(np.uint8)[start : start + 16].view(np.uint32)[:] = words


_BFLOAT16 = Codec(_widen_bfloat16, _narrow_bfloat16)
_FLOAT16 = Codec(_widen_float16, _narrow_float16)
PRIMITIVES = SimpleNamespace(
    load2=_load(2, np.uint32),
    load4=_load(4, np.uint32),
    load4_float32=_load(4, np.float32),
    store4=_store4,
    exp2=lambda x: np.exp2(np.float32(x)),
    low_halves=lambda a, b: (a & np.uint32(0xFFFF)) | (b << np.uint32(16)),
    high_halves=lambda a, b: (a >> np.uint32(16)) | (b & np.uint32(0xFFFF0000)),
    float_of_bits=lambda bits: np.int32(bits).view(np.float32),
    CODECS={"float32": Codec(np.float32, np.float32), "bfloat16": _BFLOAT16, "float16": _FLOAT16},
    MATRICES={"bfloat16": _matrix(_BFLOAT16), "float16": _matrix(_FLOAT16)},
)
