"""Tiny random models of every family, and their logits by the transformers library and by ours."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from engine import kv_pool
from engine.batch import ScheduledSequence, build_batch
from engine.model.cpu_decoder import CpuDecoder
from engine.sequence import Request, SamplingParams, Sequence
from engine.weights.load import open_checkpoint

SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "llama-untied": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama-head-dim": (transformers.LlamaConfig, {"head_dim": 64}),
    "llama-linear": (transformers.LlamaConfig, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama3": (
        transformers.LlamaConfig,
        {"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 64, **_LLAMA3}},
    ),
    "yarn": (
        transformers.LlamaConfig,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2-tied": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 64}),
    "qwen3-tied": (transformers.Qwen3Config, {"head_dim": 64, "tie_word_embeddings": True}),
}
TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 160, 90)]


def random_model(family: str, **changes: Any) -> Any:
    """float32; norms and biases are random too."""
    torch.manual_seed(11)
    config_class, own = CONFIGS[family]
    config = config_class(**{**SMALL, **own, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, mean=0.8, std=0.3)
    return model


def their_logits(model: Any) -> torch.Tensor:
    """Of TOKENS, by the transformers library."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def our_logits(
    path: Path, dtype: torch.dtype = torch.float32, chunk: int = len(TOKENS), weights: str = "dtype"
) -> torch.Tensor:
    """Of TOKENS, by our decoder on the checkpoint at `path`, `chunk` tokens a step."""
    model = CpuDecoder(open_checkpoint(str(path)), dtype, 256, weights)
    c = model.config
    kv = kv_pool.allocate(c.num_layers, 12, c.num_kv_heads, c.head_dim, dtype)
    # With prompt logprobs asked for, every row has logits.
    sequence = Sequence(Request("r", TOKENS, SamplingParams(num_prompt_logprobs=0)), 0, 0)
    sequence.block_table = [7, 2, 9, 4, 0, 11]
    parts = []
    with torch.inference_mode():
        for start in range(0, len(TOKENS), chunk):
            item = ScheduledSequence(sequence, start, min(chunk, len(TOKENS) - start))
            parts.append(model.logits(build_batch((item,)), kv).clone())
    return torch.cat(parts)


def assert_same_logits(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)
