"""Logits of tiny random models of every family against the transformers library."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine import kv_pool
from engine.batch import ScheduledSequence, build_batch
from engine.errors import ModelError
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
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {}),
    "llama-untied": (transformers.LlamaConfig, {"tie_word_embeddings": False}),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama-head-dim": (transformers.LlamaConfig, {"head_dim": 64}),
    "llama-linear": (transformers.LlamaConfig, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama3": (
        transformers.LlamaConfig,
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn": (
        transformers.LlamaConfig,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "mistral": (transformers.MistralConfig, {"sliding_window": None}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 64}),
}
TOKENS = [int(t) for t in np.random.default_rng(3).integers(0, 160, 90)]


def make_model(directory: Path, family: str) -> torch.Tensor:
    """Writes a random checkpoint; answers its logits for TOKENS by the transformers library."""
    torch.manual_seed(11)
    config_class, changes = CONFIGS[family]
    model = transformers.AutoModelForCausalLM.from_config(config_class(**SMALL, **changes)).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, mean=0.8, std=0.3)
    model.save_pretrained(directory)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def our_logits(directory: Path, dtype: torch.dtype, chunk: int) -> torch.Tensor:
    model = CpuDecoder(open_checkpoint(str(directory)), dtype, 256)
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


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("chunk", [90, 17, 1])
def test_logits_equal_those_of_transformers(tmp_path: Path, family: str, chunk: int) -> None:
    expected = make_model(tmp_path, family)
    torch.testing.assert_close(our_logits(tmp_path, torch.float32, chunk), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_close(tmp_path: Path, family: str) -> None:
    expected = make_model(tmp_path, family)
    ours = our_logits(tmp_path, torch.bfloat16, 17)
    agreement = torch.nn.functional.cosine_similarity(ours, expected, dim=-1)
    assert agreement.min() > 0.995


def test_sharded_safetensors(tmp_path: Path) -> None:
    expected = make_model(tmp_path, "llama")
    whole = tmp_path / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    torch.testing.assert_close(our_logits(tmp_path, torch.float32, 90), expected, rtol=2e-4, atol=2e-4)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.down_proj\.weight is missing"):
        CpuDecoder(open_checkpoint(str(tmp_path)), torch.float32, 64)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.zeros(63)
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[63\], expected \[128\]"):
        CpuDecoder(open_checkpoint(str(tmp_path)), torch.float32, 64)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", '{"model_type": "gpt2"}', "'gpt2' is unknown"),
        ("config.json", "{", "cannot be read"),
        ("config.json", '{"model_type": "llama"}', "num_attention_heads is missing"),
        ("model.safetensors", "short", "damaged"),
    ],
)
def test_bad_directories_are_refused(tmp_path: Path, file: str, content: str, words: str) -> None:
    make_model(tmp_path, "llama")
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelError, match=words):
        open_checkpoint(str(tmp_path))


def test_a_head_size_the_kernels_do_not_have_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(**{**SMALL, "hidden_size": 80})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="head_dim 20"):
        CpuDecoder(open_checkpoint(str(tmp_path)), torch.float32, 64)
