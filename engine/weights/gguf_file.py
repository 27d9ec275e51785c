"""Reads GGUF files of the Llama, Mistral, Qwen2 and Qwen3 families through the `gguf` package."""

import hashlib
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type

from engine.errors import ModelError
from engine.model.config import ModelConfig, RopeScaling
from engine.weights.checkpoint import check_shape, require_count, require_positive

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_proj.bias": "attn_q.bias",
    "self_attn.k_proj.bias": "attn_k.bias",
    "self_attn.v_proj.bias": "attn_v.bias",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_TOP_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}

# Of types with groups of 32 numbers.
_BITS = {Type.Q4_0: 4, Type.Q4_1: 4, Type.Q8_0: 8}


class GgufCheckpoint:
    """A `ModelFile` in one GGUF file; quantised tensors are widened to float32 when asked for."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        reader = _open(path)
        self._fields = {key: field for key, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.config = self._read_config(name)
        self.fingerprint = _fingerprint(path)

    def has(self, name: str) -> bool:
        return _gguf_name(name) in self._tensors

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        stored = self._stored(name, shape)
        try:
            # A plain array: what a memory map pays for every slice is half of the time.
            values = gguf.dequantize(np.asarray(stored.data), stored.tensor_type)
        except NotImplementedError:
            kind = stored.tensor_type.name
            raise ModelError(f"{self.path.name}: tensor {name} is quantised as {kind}, unsupported") from None
        array = np.array(values, dtype=np.float32).reshape(shape)
        return torch.from_numpy(self._in_order(name, array))

    def stored_bits(self, name: str) -> int | None:
        stored = self._tensors.get(_gguf_name(name))
        return None if stored is None else _BITS.get(stored.tensor_type)

    def tensor_4_bits(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        stored = self._stored(name, shape)
        blocks = np.array(stored.data).reshape(shape[0], -1)
        if stored.tensor_type == Type.Q4_0:
            blocks = _with_minima(blocks)
        return torch.from_numpy(self._in_order(name, blocks))

    def _stored(self, name: str, shape: tuple[int, ...]) -> Any:
        stored = self._tensors.get(_gguf_name(name))
        if stored is None:
            raise ModelError(f"{self.path.name}: tensor {name} ({_gguf_name(name)}) is missing")
        check_shape(self.path, name, (int(n) for n in reversed(stored.shape)), shape)
        return stored

    def _in_order(self, name: str, rows: np.ndarray) -> np.ndarray:
        if self.config.architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = self.config.num_heads if "q_proj" in name else self.config.num_kv_heads
            return _unpermute(rows, heads)
        return rows

    def vocabulary(self) -> list[str]:
        field = gguf.GGUFReader(self.path).fields.get("tokenizer.ggml.tokens")
        if field is None:
            raise ModelError(f"{self.path.name}: metadata key tokenizer.ggml.tokens is missing")
        tokens: list[str] = field.contents()
        return tokens

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._fields.get(key)
        if field is not None:
            return field.contents()
        if default is None:
            raise ModelError(f"{self.path.name}: metadata key {key} is missing")
        return default

    def _number(self, key: str, default: float | None = None) -> float:
        return float(require_positive(self.path.name, key, self._value(key, default)))

    def _count(self, key: str, default: int | None = None) -> int:
        return require_count(self.path.name, key, self._value(key, default))

    def _read_config(self, name: str) -> ModelConfig:
        arch = self._value("general.architecture")
        if arch not in ARCHITECTURES:
            allowed = ", ".join(ARCHITECTURES)
            raise ModelError(f"{self.path.name}: architecture {arch!r} is unknown; served are {allowed}")
        if arch != "qwen2" and "blk.0.attn_q.bias" in self._tensors:
            raise ModelError(f"{self.path.name}: tensor blk.0.attn_q.bias is not served for {arch!r}")
        heads = self._count(f"{arch}.attention.head_count")
        hidden = self._count(f"{arch}.embedding_length")
        head_dim = self._count(f"{arch}.attention.key_length", hidden // heads)
        vocab = self._tensors["token_embd.weight"].shape[1] if "token_embd.weight" in self._tensors else 0
        return ModelConfig(
            name=name,
            architecture=arch,
            num_layers=self._count(f"{arch}.block_count"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=self._count(f"{arch}.attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=self._count(f"{arch}.feed_forward_length"),
            vocab_size=int(vocab),
            max_position=self._count(f"{arch}.context_length"),
            rms_norm_eps=self._number(f"{arch}.attention.layer_norm_rms_epsilon"),
            rope_theta=self._number(f"{arch}.rope.freq_base", 10_000.0),
            rope_scaling=self._rope_scaling(arch, head_dim),
            tie_embeddings="output.weight" not in self._tensors,
            eos_token_ids=self._eos_token_ids(),
        ).validate()

    def _rope_scaling(self, arch: str, head_dim: int) -> RopeScaling | None:
        factors = self._tensors.get("rope_freqs.weight")
        if factors is not None:
            values = gguf.dequantize(factors.data, factors.tensor_type)
            check_shape(self.path, factors.name, values.shape, (head_dim // 2,))
            return RopeScaling("factors", frequency_factors=tuple(values.tolist()))
        prefix = f"{arch}.rope.scaling."
        kind = self._value(prefix + "type", "linear")
        factor = self._number(prefix + "factor", 1.0)
        if kind == "none" or (kind == "linear" and factor == 1.0):
            return None
        return RopeScaling(
            kind,
            factor,
            original_max_position=self._count(
                prefix + "original_context_length", self._count(f"{arch}.context_length")
            ),
            beta_fast=self._number(prefix + "yarn_beta_fast", 32.0),
            beta_slow=self._number(prefix + "yarn_beta_slow", 1.0),
        )

    def _eos_token_ids(self) -> tuple[int, ...]:
        keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
        return tuple(sorted({int(self._value(key)) for key in keys if key in self._fields}))


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """Steps over long arrays: the package makes an object of every element, seconds for a vocabulary."""

    LONGEST_READ = 1000
    UINT64 = struct.Struct("<Q")

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order == "S":
            return super()._get_field_parts(orig_offs, raw_type)
        kind = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        length = int(self._get(orig_offs + 4, np.uint64)[0])
        if length <= self.LONGEST_READ or kind == gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        end = orig_offs + 12
        if kind == gguf.GGUFValueType.STRING:
            data = memoryview(self.data)
            for _ in range(length):
                end += 8 + self.UINT64.unpack_from(data, end)[0]
        else:
            end += length * np.dtype(self.gguf_scalar_to_np[kind]).itemsize
        return end - orig_offs, [self.data[orig_offs:end]], [], [gguf.GGUFValueType.ARRAY, kind]


def _open(path: Path) -> _Reader:
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path}: not a GGUF file")
    try:
        return _Reader(path)
    except (ValueError, IndexError, KeyError, struct.error, OverflowError, MemoryError) as error:
        raise ModelError(
            f"{path}: truncated or damaged GGUF file, or types unknown here ({error})"
        ) from error


def _gguf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_LAYER_NAMES.get(rest, rest)}"


def _unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """GGUF interleaves the rotary halves of Llama's q and k rows; back to the half-split layout."""
    rows = weight.shape[0]
    return weight.reshape(num_heads, rows // num_heads // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _with_minima(blocks: np.ndarray) -> np.ndarray:
    """Blocks of Q4_0, whose numbers count from -8 scales, as blocks of Q4_1."""
    blocks = blocks.reshape(len(blocks), -1, 18)
    scales = np.ascontiguousarray(blocks[..., :2])
    minima = (np.float16(-8) * scales.view(np.float16)).view(np.uint8)
    return np.concatenate([scales, minima, blocks[..., 2:]], -1).reshape(len(blocks), -1)


def _fingerprint(path: Path) -> str:
    """Size, head and tail of the file: cheap for many gigabytes, different for different weights."""
    digest = hashlib.sha256(str(path.stat().st_size).encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, path.stat().st_size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()[:16]
