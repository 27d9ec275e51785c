"""What reaches the driver at a launch; and what is said where no GPU is."""

import ctypes
import re
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from engine.errors import DeviceError
from engine.kernels.cuda import compiler, launcher
from engine.kernels.cuda.catalog import KernelSpec

SPEC = KernelSpec("add_rms_norm", "bfloat16")
SUCCESS = driver.CUresult.CUDA_SUCCESS


class RecordingDriver:
    """Takes the place of the NVIDIA driver: remembers launches."""

    CUresult = driver.CUresult

    def __init__(self) -> None:
        self.loaded: list[bytes] = []
        self.launches: list[tuple[Any, ...]] = []
        self.values: list[int | float] = []

    def cuModuleLoadData(self, code: bytes) -> tuple[Any, str]:
        self.loaded.append(code)
        return SUCCESS, "module"

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[Any, str]:
        return SUCCESS, f"{module}:{name.decode()}"

    def cuLaunchKernel(self, *arguments: Any) -> tuple[Any]:
        self.launches.append(arguments[:-2])
        addresses = (ctypes.c_void_p * 6).from_address(arguments[-2])
        kinds: list[Any] = [ctypes.c_uint64] * 4 + [ctypes.c_int32, ctypes.c_float]
        self.values = [
            kind.from_address(address or 0).value for kind, address in zip(kinds, addresses, strict=True)
        ]
        return (SUCCESS,)


def test_arguments_are_packed_as_the_kernel_declares_them(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = RecordingDriver()
    monkeypatch.setattr(launcher, "driver", recorder)
    tensors = [torch.zeros(8) for _ in range(4)]
    kernel = launcher._LoadedKernel(SPEC, b"code")
    kernel.launch((5, 1, 1), (256, 1, 1), 1234, (*tensors, 8, 0.5))
    assert recorder.loaded == [b"code"]
    assert recorder.launches == [("module:add_rms_norm", 5, 1, 1, 256, 1, 1, 0, 1234)]
    assert recorder.values == [*(t.data_ptr() for t in tensors), 8, 0.5]


def test_the_compiled_entry_takes_these_parameters() -> None:
    declared = re.findall(r"\.param \.(\w+) add_rms_norm_param_\d", compiler.make_ptx(SPEC))
    assert declared == ["u64", "u64", "u64", "u64", "u32", "f32"]


def test_a_failed_driver_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = RecordingDriver()
    failed = (driver.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU, None)
    monkeypatch.setattr(recorder, "cuModuleLoadData", lambda code: failed)
    monkeypatch.setattr(launcher, "driver", recorder)
    with pytest.raises(DeviceError, match="CUDA_ERROR_NO_BINARY_FOR_GPU"):
        launcher._LoadedKernel(SPEC, b"code")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_sentence_says_so() -> None:
    with pytest.raises(DeviceError, match="no CUDA GPU"):
        launcher.GpuLauncher(torch.device("cuda"))


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(DeviceError, match=r"Tesla T4 has compute capability 7\.5; NexusKV needs 8\.0"):
        launcher.require_gpu(torch.device("cuda"))


def test_an_old_driver_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = RecordingDriver()
    monkeypatch.setattr(recorder, "cuDriverGetVersion", lambda: (SUCCESS, 12080), raising=False)
    monkeypatch.setattr(launcher, "driver", recorder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    with pytest.raises(DeviceError, match="supports CUDA 12; the kernels are assembled for CUDA 13"):
        launcher.require_gpu(torch.device("cuda"))
