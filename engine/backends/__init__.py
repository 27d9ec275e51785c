"""The devices that a model is served on, and which one is taken."""

import logging
from typing import Protocol

import torch

from engine.backends.cpu import CpuBackend
from engine.errors import DeviceError
from engine.kv_pool import KVPool
from engine.options import EngineOptions
from engine.runner import Model, ModelRunner
from engine.scheduler import SchedulerLimits
from engine.weights.checkpoint import Checkpoint

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """Everything in which serving on one device differs from serving on another."""

    name: str  # for people: the kind of device and its make
    device: torch.device  # where weights, pool and logits are
    records_decodes: bool  # whether a step that only decodes costs less than another of as many rows

    def compute_dtype(self, wanted: torch.dtype) -> torch.dtype:
        """What is computed in when `wanted` is asked for."""
        ...

    def load(self, checkpoint: Checkpoint, dtype: torch.dtype, max_position: int) -> Model:
        """Raises ModelError when the model cannot be served here."""
        ...

    def pool_bytes(self) -> int:
        """What the KV pool may take, now that the weights are loaded; not positive: there is no room."""
        ...

    def runner(self, model: Model, kv: KVPool, limits: SchedulerLimits) -> ModelRunner:
        """Gets a model that this backend has loaded ready to run."""
        ...


def choose_backend(options: EngineOptions) -> Backend:
    """The GPU if it is asked for, or there is one that can be used. Raises DeviceError in one sentence."""
    if options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available()):
        try:
            return _cuda_backend(options)
        except DeviceError as error:
            if options.device == "cuda":
                raise DeviceError(f"--device cuda: {error}") from error
            logger.warning("%s; computing on the CPU", error)
    return CpuBackend(options.num_threads, options.memory_fraction, options.weights)


def _cuda_backend(options: EngineOptions) -> Backend:
    if options.weights == "int8":
        raise DeviceError("--weights int8 is for CPUs")
    # Most machines have neither a GPU nor the packages that these modules import.
    try:
        from engine.backends.cuda import CudaBackend
        from engine.kernels.cuda.launcher import GpuLauncher
    except ImportError as error:
        raise DeviceError(f"{error}; the extra nexuskv[cuda] brings what is missing") from error
    launcher = GpuLauncher(torch.device("cuda", 0))
    return CudaBackend(launcher, options.gpu_memory_utilization)
