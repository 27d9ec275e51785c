"""GGUF files of every family and every type of tensor, against the `gguf` and transformers packages."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from engine.errors import ModelError
from engine.model.cpu_decoder import CpuDecoder
from engine.model.layer_weights import stored_bits
from engine.weights.load import open_checkpoint
from tests.engine.gguf_files import write_gguf
from tests.engine.tiny_models import CONFIGS, assert_same_logits, our_logits, random_model, their_logits

KINDS = [
    Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q4_K, Type.Q5_K, Type.Q6_K,
]  # fmt: skip
# Rows of the K types come in blocks of 256.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
ROPE: dict[str, dict[str, Any]] = {
    "llama-linear": {"rope__scaling__type": "linear", "rope__scaling__factor": 2.0},
    "yarn": {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 4.0,
        "rope__scaling__original_context_length": 64,
    },
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def assert_same_tensors(file: Path, model: Any) -> None:
    checkpoint = open_checkpoint(str(file))
    for name, parameter in model.named_parameters():
        assert torch.equal(checkpoint.tensor(name, tuple(parameter.shape)), parameter), name


def assert_similar_logits(ours: torch.Tensor, theirs: torch.Tensor, most: float) -> None:
    """Rows in 8 bits cost a few hundredths."""
    error = float((ours - theirs).norm() / theirs.norm())
    assert error < most


@pytest.mark.parametrize("family", CONFIGS)
def test_families(file: Path, family: str) -> None:
    model = random_model(family)
    write_gguf(file, model, **ROPE.get(family, {}))
    assert_same_tensors(file, model)
    assert_same_logits(our_logits(file), their_logits(model))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_types(file: Path, family: str, kind: Type) -> None:
    model = random_model(family, **WIDE)
    write_gguf(file, model, kind)
    assert_same_tensors(file, model)
    assert_same_logits(our_logits(file), their_logits(model))


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_4_bits_stay_as_they_are(file: Path, family: str, kind: Type) -> None:
    model = random_model(family)
    write_gguf(file, model, kind)
    checkpoint = open_checkpoint(str(file))
    for name, parameter in model.named_parameters():
        assert checkpoint.stored_bits(name) == (4 if parameter.ndim == 2 else None)
        if parameter.ndim == 2:
            blocks = checkpoint.tensor_4_bits(name, tuple(parameter.shape))
            values = gguf.dequantize(blocks.numpy(), Type.Q4_1)
            torch.testing.assert_close(torch.from_numpy(values), parameter.detach(), rtol=1e-6, atol=1e-7)
    assert_similar_logits(our_logits(file, weights="int8"), their_logits(model), 0.1)
    assert_similar_logits(our_logits(file, torch.bfloat16, weights="auto"), their_logits(model), 0.03)


def test_matrices_of_other_types_among_those_of_4_bits(file: Path) -> None:
    """A matrix stays as it is stored if all its parts are stored so in every layer."""
    model = random_model("llama")
    others = {
        "model.layers.1.self_attn.v_proj.weight": Type.F16,
        "model.layers.0.mlp.down_proj.weight": Type.Q8_0,
    }
    write_gguf(file, model, Type.Q4_1, kinds=others)
    assert stored_bits(open_checkpoint(str(file))) == {"output": 4, "gate_up": 4}
    assert_similar_logits(our_logits(file, weights="int8"), their_logits(model), 0.1)
    assert_similar_logits(our_logits(file, torch.bfloat16, weights="auto"), their_logits(model), 0.03)


def test_a_file_without_a_scaling_type_scales_linearly(file: Path) -> None:
    model = random_model("llama-linear")
    write_gguf(file, model, rope__scaling__factor=2.0)
    assert_same_logits(our_logits(file), their_logits(model))


def test_a_file_without_a_head_size_has_the_usual_one(file: Path) -> None:
    model = random_model("llama")
    write_gguf(file, model, attention__key_length=None)
    assert_same_logits(our_logits(file), their_logits(model))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("block_count", None, r"metadata key llama\.block_count is missing"),
        ("block_count", "two", r"llama\.block_count is 'two', expected a number above 0"),
        ("attention__head_count", 0, r"llama\.attention\.head_count is 0"),
        ("rope__scaling__type", "longrope", "rope scaling 'longrope' is unknown"),
        (
            "block_count",
            4,
            r"model\.layers\.3\.input_layernorm\.weight \(blk\.3\.attn_norm\.weight\) is missing",
        ),
        ("feed_forward_length", 90, r"mlp\.gate_proj\.weight has shape \[96, 128\], expected \[90, 128\]"),
        ("attention__head_count_kv", 3, "4 heads cannot share 3 KV heads"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(file: Path, key: str, value: Any, words: str) -> None:
    write_gguf(file, random_model("llama"), **{key: value})
    with pytest.raises(ModelError, match=words):
        CpuDecoder(open_checkpoint(str(file)), torch.float32, 64)


def test_an_unknown_architecture_is_named(file: Path) -> None:
    model = random_model("llama")
    model.config.model_type = "mamba"
    write_gguf(file, model)
    with pytest.raises(ModelError, match="architecture 'mamba' is unknown; served are llama, qwen2, qwen3"):
        open_checkpoint(str(file))


def test_biases_of_a_family_that_has_none_are_refused(file: Path) -> None:
    model = random_model("qwen2")
    model.config.model_type = "llama"
    write_gguf(file, model)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_q\.bias is not served for 'llama'"):
        open_checkpoint(str(file))


def retype(file: Path, kind: int) -> None:
    """Gives the embedding another type: it stands behind the tensor's name, rank and two sizes."""
    content, name = bytearray(file.read_bytes()), b"token_embd.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8
    content[at : at + 4] = kind.to_bytes(4, "little")
    file.write_bytes(content)


def test_an_unsupported_type_is_named(file: Path) -> None:
    write_gguf(file, random_model("llama"))
    retype(file, Type.I32)  # of the same size
    with pytest.raises(
        ModelError, match=r"tensor model\.embed_tokens\.weight is quantised as I32, unsupported"
    ):
        CpuDecoder(open_checkpoint(str(file)), torch.float32, 64)


def test_an_unknown_type_is_named(file: Path) -> None:
    write_gguf(file, random_model("llama"))
    retype(file, 999)
    with pytest.raises(ModelError, match=r"types unknown here .*999.* is not a valid GGMLQuantizationType"):
        open_checkpoint(str(file))


def test_long_arrays_are_stepped_over_and_a_vocabulary_is_read(file: Path) -> None:
    tokens = [f"token {index}" for index in range(1_500)]
    long: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.5] * 1_500,
        "flags": [True] * 2_000,
    }
    model = random_model("llama")
    write_gguf(file, model, arrays=long)
    assert_same_tensors(file, model)
    assert open_checkpoint(str(file)).vocabulary() == tokens
    content = file.read_bytes()
    file.write_bytes(content[: content.index(b"token 1200")])
    with pytest.raises(ModelError, match=r"tiny\.gguf: truncated or damaged"):
        open_checkpoint(str(file))


def test_a_file_without_a_vocabulary_says_so(file: Path) -> None:
    write_gguf(file, random_model("llama"))
    with pytest.raises(ModelError, match=r"metadata key tokenizer\.ggml\.tokens is missing"):
        open_checkpoint(str(file)).vocabulary()


@pytest.mark.parametrize("kept", [0, 3, 20, 300, 2_000, -1])
def test_a_truncated_file_is_named(file: Path, kept: int) -> None:
    write_gguf(file, random_model("llama"))
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ModelError, match=r"tiny\.gguf: (truncated or damaged|not a) GGUF file"):
        open_checkpoint(str(file))
