"""Logits of tiny random models of every family against the transformers library."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.model.cpu_decoder import CpuDecoder
from engine.weights.load import open_checkpoint
from tests.engine.tiny_models import CONFIGS, assert_same_logits, our_logits, random_model, their_logits


def make_model(directory: Path, family: str) -> torch.Tensor:
    """Writes a random checkpoint; answers its logits for TOKENS by the transformers library."""
    model = random_model(family)
    model.save_pretrained(directory)
    return their_logits(model)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("chunk", [90, 17, 1])
def test_logits_equal_those_of_transformers(tmp_path: Path, family: str, chunk: int) -> None:
    expected = make_model(tmp_path, family)
    assert_same_logits(our_logits(tmp_path, chunk=chunk), expected)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_close(tmp_path: Path, family: str) -> None:
    expected = make_model(tmp_path, family)
    ours = our_logits(tmp_path, torch.bfloat16, 17)
    agreement = torch.nn.functional.cosine_similarity(ours, expected, dim=-1)
    assert agreement.min() > 0.995


def make_shards(directory: Path) -> torch.Tensor:
    """Two files and an index."""
    expected = make_model(directory, "llama")
    whole = directory / "model.safetensors"
    tensors = load_file(whole)
    whole.unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return expected


def test_sharded_safetensors(tmp_path: Path) -> None:
    expected = make_shards(tmp_path)
    assert_same_logits(our_logits(tmp_path), expected)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_shards(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors cannot be read"):
        open_checkpoint(str(tmp_path))


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    make_shards(tmp_path)
    shard = tmp_path / "b.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"b\.safetensors: cannot read tensor"):
        CpuDecoder(open_checkpoint(str(tmp_path)), torch.float32, 64)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated or damaged"):
        open_checkpoint(str(tmp_path))


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
        ("model.safetensors.index.json", "{}", "weight_map is missing"),
    ],
)
def test_bad_directories_are_refused(tmp_path: Path, file: str, content: str, words: str) -> None:
    make_model(tmp_path, "llama")
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelError, match=words):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_hidden_layers", "many", "num_hidden_layers is 'many', expected a number above 0"),
        ("num_attention_heads", 0, "num_attention_heads is 0"),
        ("attention_bias", True, "attention_bias True is not served"),
        ("mlp_bias", True, "mlp_bias True is not served"),
        ("hidden_act", "gelu", "hidden_act 'gelu' is not served, only 'silu'"),
        ("quantization_config", {"bits": 4}, "quantised safetensors are not served"),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 2.0}, "rope scaling 'dynamic' is unknown"),
        ("rope_scaling", {"rope_type": "linear"}, "rope factor is None"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 0}, "rope factor is 0"),
        ("rope_scaling", "linear", "rope_scaling is 'linear', expected an object"),
        ("rms_norm_eps", math.nan, "rms_norm_eps is nan"),
        ("rope_theta", math.inf, "rope_theta is inf"),
        ("head_dim", "64", "head_dim is '64'"),
        ("num_hidden_layers", 1.5, "num_hidden_layers is 1.5, expected a whole number"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path: Path, key: str, value: object, words: str) -> None:
    make_model(tmp_path, "llama")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(ModelError, match=words):
        CpuDecoder(open_checkpoint(str(tmp_path)), torch.float32, 64)


@pytest.mark.parametrize(
    ("scaling", "max_position"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "linear", "factor": 4.0}, 1024),
        ({"type": "llama3", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    ],
)
def test_a_stretched_context_can_be_used(tmp_path: Path, scaling: dict[str, Any], max_position: int) -> None:
    """What is added to a file counts, whatever the file had before."""
    make_model(tmp_path, "llama")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert config["max_position_embeddings"] == 256
    file.write_text(json.dumps({**config, "rope_scaling": scaling}))
    read = open_checkpoint(str(tmp_path)).config
    assert read.max_position == max_position
    assert read.rope_scaling is not None
    assert read.rope_scaling.kind == scaling["type"]


def test_a_head_size_the_kernels_do_not_have_is_refused(tmp_path: Path) -> None:
    random_model("llama", hidden_size=80).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="head_dim 20"):
        CpuDecoder(open_checkpoint(str(tmp_path)), torch.float32, 64)
