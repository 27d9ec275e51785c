"""Kernels on a GPU: loaded once, launched on torch's current stream."""

import ctypes
import os
import struct
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from cuda.bindings import driver, nvjitlink
from numba import cuda

from engine.errors import DeviceError
from engine.kernels.cuda import primitives
from engine.kernels.cuda.attention_tensor import blocks_per_multiprocessor
from engine.kernels.cuda.catalog import CATALOG, KernelSpec
from engine.kernels.cuda.compiler import OLDEST, cubins
from engine.kernels.cuda.parameters import Scalar, parameters
from engine.kernels.cuda.plan import Tuning

Dim3 = tuple[int, int, int]
Argument = torch.Tensor | int | float
_FORMATS = {"int32": "i", "int64": "q", "float32": "f"}


class Recording(NamedTuple):
    result: torch.Tensor  # written anew by every replay
    replay: Callable[[], None]


Recorder = Callable[[Callable[[], torch.Tensor]], Recording]


class Launcher(Protocol):
    """A GPU, or what stands for one."""

    name: str
    device: torch.device

    def prepare(self, specs: Iterable[KernelSpec]) -> None:
        """Makes sure that these kernels can be launched at once, from within a graph capture too."""
        ...

    def launch(self, spec: KernelSpec, grid: Dim3, block: Dim3, *arguments: Argument) -> None:
        """Queues a kernel. Tensors are contiguous and live until it has run; they are passed as pointers."""
        ...

    def wait(self) -> None:
        """Until all that is queued has run."""
        ...

    def recorder(self) -> Recorder:
        """Records what work queues, to queue it again with one launch; work runs once before.

        What one recorder has recorded shares memory and must not run at the same time.
        """
        ...

    def tuning(self, head_dim: int) -> Tuning:
        """How attention of heads of this size is best divided."""
        ...

    def memory_bytes(self) -> tuple[int, int]:
        """Free and total."""
        ...


class GpuLauncher:
    """Launches from one thread at a time. A thread's first launch comes after an operation of torch's, which
    makes the GPU's context current on it."""

    def __init__(self, device: torch.device) -> None:
        """Raises DeviceError when the GPU or its driver is too old."""
        self.device = device
        self._capability = require_gpu(device)
        self.name = f"cuda ({torch.cuda.get_device_name(device)})"
        self._kernels: dict[KernelSpec, _LoadedKernel] = {}

    def prepare(self, specs: Iterable[KernelSpec]) -> None:
        missing = [spec for spec in specs if spec not in self._kernels]
        torch.cuda.synchronize(self.device)  # torch makes its context current on this thread
        for spec, code in cubins(missing, self._capability, os.cpu_count() or 1).items():
            self._kernels[spec] = _LoadedKernel(spec, code)

    def launch(self, spec: KernelSpec, grid: Dim3, block: Dim3, *arguments: Argument) -> None:
        if spec not in self._kernels:
            self.prepare([spec])
        stream = torch.cuda.current_stream(self.device).cuda_stream
        self._kernels[spec].launch(grid, block, stream, arguments)

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def recorder(self) -> Recorder:
        memory = torch.cuda.graph_pool_handle()

        def record(work: Callable[[], torch.Tensor]) -> Recording:
            # The first run loads kernels and makes torch choose its own, which a recording may not.
            work()
            self.wait()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=memory):
                result = work()
            return Recording(result, graph.replay)

        return record

    def tuning(self, head_dim: int) -> Tuning:
        """Attention in as many blocks as the GPU's multiprocessors hold at once."""
        count = torch.cuda.get_device_properties(self.device).multi_processor_count
        return Tuning(num_blocks=count * blocks_per_multiprocessor(head_dim))

    def memory_bytes(self) -> tuple[int, int]:
        torch.cuda.empty_cache()  # what torch holds in reserve is free
        return torch.cuda.mem_get_info(self.device)


class _LoadedKernel:
    """A kernel in the current context, with the memory its arguments are packed into."""

    def __init__(self, spec: KernelSpec, code: bytes) -> None:
        kernel = CATALOG[spec.name].factory(cuda, primitives, spec.element, *spec.constants)
        codes = [_FORMATS[p.type] if isinstance(p, Scalar) else "P" for p in parameters(kernel)]
        layout = "".join(codes)
        self._packer = struct.Struct(f"@{layout}")
        self._values = ctypes.create_string_buffer(self._packer.size)
        base = ctypes.addressof(self._values)
        # With "@", each value sits where C would align it.
        offsets = [struct.calcsize(f"@{layout[: i + 1]}") - struct.calcsize(c) for i, c in enumerate(codes)]
        self._addresses = (ctypes.c_void_p * len(codes))(*(base + offset for offset in offsets))
        self._module = _checked(driver.cuModuleLoadData(code))
        self._function = _checked(driver.cuModuleGetFunction(self._module, spec.name.encode()))

    def launch(self, grid: Dim3, block: Dim3, stream: int, arguments: tuple[Argument, ...]) -> None:
        plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        self._packer.pack_into(self._values, 0, *plain)
        addresses = ctypes.addressof(self._addresses)
        _checked(driver.cuLaunchKernel(self._function, *grid, *block, 0, stream, addresses, 0))


def require_gpu(device: torch.device) -> tuple[int, int]:
    """The GPU's compute capability. Raises DeviceError in one sentence when it cannot be used."""
    if torch.version.cuda is None:
        raise DeviceError(
            "no CUDA GPU can be used: this torch is built without CUDA; "
            'the README, "GPUs", has the pip line for one that is and for nexuskv[cuda]'
        )
    try:
        served = _checked(driver.cuDriverGetVersion()) // 1000
    except RuntimeError as error:
        raise DeviceError(f"no CUDA GPU can be used: there is no NVIDIA driver ({error})") from error
    needed = max(nvjitlink.version()[0], int(torch.version.cuda.partition(".")[0]))
    if served < needed:
        raise DeviceError(
            f"the NVIDIA driver supports CUDA {served}; torch and the kernels need CUDA {needed}: update it"
        )
    if not torch.cuda.is_available():
        raise DeviceError("no CUDA GPU can be used: torch sees none (see nvidia-smi, CUDA_VISIBLE_DEVICES)")
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        raise DeviceError(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}; "
            f"NexusKV needs {OLDEST[0]}.{OLDEST[1]} (Ampere) or newer"
        )
    return capability


def _checked(answer: tuple[Any, ...]) -> Any:
    """The value of a driver call. Raises DeviceError when it failed."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DeviceError(f"the CUDA driver answered {status.name}")
    return values[0] if values else None
