"""Serving on an NVIDIA GPU."""

from functools import partial

import torch

from engine.kernels.cuda.kernels import CudaKernels
from engine.kernels.cuda.launcher import Launcher
from engine.kv_pool import KVPool
from engine.model.cuda_decoder import CudaDecoder
from engine.model.cuda_page_mover import CudaPageMover
from engine.model.cuda_sampling import sample_rows
from engine.runner import Model, ModelRunner
from engine.scheduler import SchedulerLimits
from engine.weights.checkpoint import Checkpoint


class CudaBackend:
    """A `Backend`. The launcher stands for the GPU, so that a simulator can take its place."""

    records_decodes = True

    def __init__(self, launcher: Launcher, memory_utilization: float) -> None:
        """`memory_utilization`: share of the GPU's memory in use once weights and KV pool are there."""
        self.name = launcher.name
        self.device = launcher.device
        self._launcher = launcher
        self._utilization = memory_utilization
        # Sums are float32 to the end, however torch divides them.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False

    def compute_dtype(self, wanted: torch.dtype) -> torch.dtype:
        return wanted

    def load(self, checkpoint: Checkpoint, dtype: torch.dtype, max_position: int) -> CudaDecoder:
        kernels = CudaKernels(self._launcher, self._launcher.tuning(checkpoint.config.head_dim))
        with torch.inference_mode():
            return CudaDecoder(checkpoint, dtype, max_position, kernels)

    def pool_bytes(self) -> int:
        free, total = self._launcher.memory_bytes()
        return int(total * self._utilization) - (total - free)

    def runner(self, model: Model, kv: KVPool, limits: SchedulerLimits) -> ModelRunner:
        assert isinstance(model, CudaDecoder)
        with torch.inference_mode():
            model.record_decodes(kv, limits.max_num_seqs, limits.max_model_len)
        draw, mover = partial(sample_rows, model.kernels), CudaPageMover(model.kernels, kv)
        return ModelRunner(model, kv, draw, mover)
