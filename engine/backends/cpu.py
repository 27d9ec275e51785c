"""Serving on a CPU."""

import os

import numba
import torch

from engine.kv_pool import KVPool
from engine.model.cpu_decoder import CpuDecoder
from engine.runner import Model, ModelRunner
from engine.scheduler import SchedulerLimits
from engine.weights.checkpoint import Checkpoint


class CpuBackend:
    """A `Backend`."""

    name = "cpu"
    device = torch.device("cpu")
    records_decodes = False

    def __init__(self, num_threads: int, memory_fraction: float, weights: str = "dtype") -> None:
        """num_threads 0: one per core. The pool takes `memory_fraction` of the RAM that is free. `weights` as
        in `pack_weights`."""
        self._weights = weights
        self._memory_fraction = memory_fraction
        threads = num_threads or os.cpu_count() or 1
        torch.set_num_threads(threads)
        numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))

    def compute_dtype(self, wanted: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if wanted is torch.float16 else wanted  # CPUs have no float16 arithmetic

    def load(self, checkpoint: Checkpoint, dtype: torch.dtype, max_position: int) -> Model:
        return CpuDecoder(checkpoint, dtype, max_position, self._weights)

    def pool_bytes(self) -> int:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(free * self._memory_fraction)

    def runner(self, model: Model, kv: KVPool, limits: SchedulerLimits) -> ModelRunner:
        return ModelRunner(model, kv)
