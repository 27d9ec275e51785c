"""Builds an engine: loads a checkpoint on a device, sizes and allocates the KV pool, warms up."""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine import kv_pool
from engine.backends import Backend, choose_backend
from engine.engine import Engine
from engine.errors import ModelError
from engine.kv_pool import BLOCK_SIZE
from engine.memory_client import MemoryClient
from engine.model.config import ModelConfig
from engine.options import EngineOptions
from engine.runner import ModelRunner
from engine.scheduler import SchedulerLimits
from engine.speculation.draft_loading import load_draft_weights
from engine.speculation.drafter import Drafter
from engine.speculation.planner import SpeculationPlanner
from engine.speculation.prompt_lookup import PromptLookup
from engine.speculation.shared_index import SharedIndex
from engine.warm_up import warm_up
from engine.weights.checkpoint import Checkpoint

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


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
    runner: ModelRunner
    planner: SpeculationPlanner | None

    def engine(self, memory: MemoryClient) -> Engine:
        return Engine(self.runner, memory, self.info.limits, self.info.fingerprint, self.planner)


def load_model(
    checkpoint: Checkpoint,
    options: EngineOptions,
    backend: Backend | None = None,
    draft: Checkpoint | None = None,
) -> LoadedModel:
    """Loads and warms up, on the device that the options name unless one is given.

    draft: of a smaller model with the same vocabulary, which drafts.
    Raises ModelError in one sentence when it cannot.
    """
    backend = backend or choose_backend(options)
    config, dtype = checkpoint.config, backend.compute_dtype(DTYPES[options.dtype])
    max_model_len = _max_model_len(config, options.max_model_len)
    try:
        model = backend.load(checkpoint, dtype, max_model_len)
        drafting = None if draft is None else load_draft_weights(draft, backend, dtype, max_model_len)
        configs = [config] if draft is None else [config, draft.config]
        num_blocks = options.num_blocks or _num_blocks(configs, dtype, backend.pool_bytes())
        limits = SchedulerLimits(
            num_blocks=num_blocks,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_waiting=options.max_waiting,
            max_model_len=min(max_model_len, num_blocks * BLOCK_SIZE),
        )
        kv = kv_pool.allocate(
            config.num_layers, num_blocks, config.num_kv_heads, config.head_dim, dtype, backend.device
        )
        runner = backend.runner(model, kv, limits)
        costs = warm_up(runner, limits, config.vocab_size, backend.records_decodes)
        draft_model = None if drafting is None else drafting.start(backend, limits, config.vocab_size)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"{config.name} does not fit the memory of {backend.name}: "
            "lower --gpu-memory-utilization, --kv-blocks, --max-num-seqs or --max-num-batched-tokens"
        ) from error
    drafters: list[Drafter] = [SharedIndex(), PromptLookup(options.draft_branches)]
    planner = SpeculationPlanner(drafters, *costs, draft_model) if options.speculation else None
    dtype_name = str(dtype).removeprefix("torch.")
    info = ModelInfo(
        name=options.served_name or config.name,
        path=checkpoint.path,
        # K/V of another dtype, or made by other weights, is not the same K/V.
        fingerprint=f"{checkpoint.fingerprint}-{dtype_name}-{options.weights}",
        device=backend.name,
        dtype=dtype_name,
        vocab_size=config.vocab_size,
        limits=limits,
    )
    return LoadedModel(info, runner, planner)


def _max_model_len(config: ModelConfig, wanted: int) -> int:
    if wanted > config.max_position:
        raise ModelError(
            f"max_model_len {wanted} is more than the {config.max_position} tokens of {config.name}"
        )
    return wanted or config.max_position


def _num_blocks(configs: list[ModelConfig], dtype: torch.dtype, num_bytes: int) -> int:
    """Blocks that so many bytes hold, each with K/V of all these models."""
    per_block = sum(kv_pool.block_bytes(c.num_layers, c.num_kv_heads, c.head_dim, dtype) for c in configs)
    if num_bytes < per_block:
        raise ModelError(
            f"{configs[0].name} leaves no memory for a KV pool: a block takes {per_block} bytes, "
            f"{max(num_bytes, 0)} are left; raise --gpu-memory-utilization or --kv-memory-fraction"
        )
    return num_bytes // per_block
