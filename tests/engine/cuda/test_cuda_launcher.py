"""What reaches the driver at a launch; and what is said where no GPU is."""

import ctypes
import re
import sys
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from engine.backends import choose_backend
from engine.backends.cpu import CpuBackend
from engine.backends.cuda import CudaBackend
from engine.errors import DeviceError
from engine.kernels.cuda import compiler, launcher
from engine.kernels.cuda.catalog import KernelSpec
from engine.kernels.cuda.parameters import Int, Int32s, Int64s, Long, Pointer, Scalar, parameters
from tests.engine.harness import engine_options

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


def test_an_array_is_not_taken_for_a_number_of_its_type() -> None:
    def kernel(blocks: Int32s, count: Int, tokens: Int64s, stride: Long) -> None: ...

    kinds = [type(parameter) for parameter in parameters(kernel)]
    assert kinds == [Pointer, Scalar, Pointer, Scalar]


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


class PretendedGpu:
    """What torch and the driver say of a GPU that is not there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver_version, self.capability, self.is_visible = 13_000, (9, 0), True
        self.driver = RecordingDriver()
        monkeypatch.setattr(
            self.driver, "cuDriverGetVersion", lambda: (SUCCESS, self.driver_version), raising=False
        )
        monkeypatch.setattr(launcher, "driver", self.driver)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: self.is_visible)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Pretended")


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> PretendedGpu:
    return PretendedGpu(monkeypatch)


def test_a_gpu_that_can_be_used_is_taken(pretended: PretendedGpu) -> None:
    for device in ("auto", "cuda"):
        backend = choose_backend(engine_options(device=device))
        assert isinstance(backend, CudaBackend)
        assert backend.name == "cuda (Pretended)"
        assert backend.device == torch.device("cuda", 0)


def test_weights_for_cpus_are_served_on_one(pretended: PretendedGpu) -> None:
    with pytest.raises(DeviceError, match="--device cuda: --weights int8 is for CPUs"):
        choose_backend(engine_options(device="cuda", weights="int8"))
    assert isinstance(choose_backend(engine_options(device="auto", weights="int8")), CpuBackend)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"capability": (7, 5)}, "Pretended has compute capability 7.5; NexusKV needs 8.0"),
        ({"driver_version": 12_080}, "supports CUDA 12; torch and the kernels need CUDA 13"),
        ({"is_visible": False}, "no CUDA GPU can be used: torch sees none"),
    ],
)
def test_what_cannot_be_used_is_refused_and_passed_over(
    pretended: PretendedGpu, changes: dict[str, Any], sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    vars(pretended).update(changes)
    with pytest.raises(DeviceError, match=f"--device cuda: .*{re.escape(sentence)}"):
        choose_backend(engine_options(device="cuda"))
    assert isinstance(choose_backend(engine_options(device="auto")), CpuBackend)
    assert (sentence in caplog.text) == pretended.is_visible


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for CUDA")
def test_a_torch_without_cuda_is_said_to_be_one() -> None:
    with pytest.raises(DeviceError, match=r"no CUDA GPU.*built without CUDA.*nexuskv\[cuda\]"):
        choose_backend(engine_options(device="cuda"))
    assert isinstance(choose_backend(engine_options(device="auto")), CpuBackend)


def test_a_missing_driver_is_named(pretended: PretendedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("Failed to dlopen libcuda.so.1")

    monkeypatch.setattr(pretended.driver, "cuDriverGetVersion", missing)
    with pytest.raises(DeviceError, match=r"no NVIDIA driver \(Failed to dlopen libcuda"):
        launcher.require_gpu(torch.device("cuda", 0))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "engine.backends.cuda", None)
    with pytest.raises(DeviceError, match=r"nexuskv\[cuda\]"):
        choose_backend(engine_options(device="cuda"))
