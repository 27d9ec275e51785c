"""Builds an engine: opens the checkpoint, loads the model, sizes and allocates the KV pool."""

import os
from dataclasses import dataclass
from pathlib import Path

import numba
import torch

from engine import kv_pool
from engine.engine import Engine
from engine.errors import ModelError
from engine.kv_pool import BLOCK_SIZE, KVPool
from engine.memory_client import MemoryClient
from engine.model.config import ModelConfig
from engine.model.cpu_decoder import CpuDecoder
from engine.runner import ModelRunner
from engine.scheduler import SchedulerLimits
from engine.speculation.planner import SpeculationPlanner
from engine.speculation.prompt_lookup import PromptLookup
from engine.speculation.shared_index import SharedIndex
from engine.warm_up import warm_up
from engine.weights.load import open_checkpoint

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class EngineOptions:
    model: str
    served_name: str  # empty: the checkpoint's
    device: str  # "auto", "cpu" or "cuda"
    dtype: str
    max_model_len: int  # 0: the model's context
    num_blocks: int  # 0: from memory_fraction
    memory_fraction: float
    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    num_threads: int  # 0: one per core
    speculation: bool


@dataclass(frozen=True)
class ModelInfo:
    name: str
    path: Path
    fingerprint: str
    device: str
    dtype: str
    vocab_size: int
    limits: SchedulerLimits
    block_size: int = BLOCK_SIZE


@dataclass(frozen=True)
class LoadedModel:
    info: ModelInfo
    model: CpuDecoder
    kv: KVPool
    planner: SpeculationPlanner | None

    def engine(self, memory: MemoryClient) -> Engine:
        return Engine(self.model, self.kv, memory, self.info.limits, self.info.fingerprint, self.planner)


def load_model(options: EngineOptions) -> LoadedModel:
    """Loads and warms up. Raises ModelError in one sentence when it cannot."""
    device, dtype = _device(options.device), DTYPES[options.dtype]
    if device == "cpu" and dtype is torch.float16:
        dtype = torch.bfloat16  # CPUs have no float16 arithmetic
    threads = options.num_threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    checkpoint = open_checkpoint(options.model)
    config = checkpoint.config
    num_blocks = options.num_blocks or _num_blocks(config, dtype, options.memory_fraction)
    context = min(config.max_position, num_blocks * BLOCK_SIZE)
    max_model_len = options.max_model_len or context
    if max_model_len > config.max_position:
        raise ModelError(
            f"max_model_len {max_model_len} is more than the {config.max_position} tokens of {config.name}"
        )
    limits = SchedulerLimits(
        num_blocks=num_blocks,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_waiting=options.max_waiting,
        max_model_len=min(max_model_len, context),
    )
    model = CpuDecoder(checkpoint, dtype, limits.max_model_len)
    kv = kv_pool.allocate(config.num_layers, num_blocks, config.num_kv_heads, config.head_dim, dtype)
    cost = warm_up(ModelRunner(model, kv), num_blocks, config.vocab_size)
    planner = SpeculationPlanner([SharedIndex(), PromptLookup()], cost) if options.speculation else None
    info = ModelInfo(
        name=options.served_name or config.name,
        path=checkpoint.path,
        # K/V of another dtype is not the same K/V.
        fingerprint=f"{checkpoint.fingerprint}-{str(dtype).removeprefix('torch.')}",
        device=device,
        dtype=str(dtype).removeprefix("torch."),
        vocab_size=config.vocab_size,
        limits=limits,
    )
    return LoadedModel(info, model, kv, planner)


def _device(wanted: str) -> str:
    if wanted == "cuda":
        raise ModelError("--device cuda: this version computes on CPUs only; use --device cpu")
    return "cpu"


def _num_blocks(config: ModelConfig, dtype: torch.dtype, fraction: float) -> int:
    """Blocks that `fraction` of the free memory holds."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    per_block = kv_pool.block_bytes(config.num_layers, config.num_kv_heads, config.head_dim, dtype)
    return max(1, int(free * fraction) // per_block)
