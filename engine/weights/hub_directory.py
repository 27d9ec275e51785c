"""Reads model directories as Hugging Face lays them out: config.json and *.safetensors."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelError
from engine.model.config import ModelConfig, RopeScaling
from engine.weights.checkpoint import check_shape, require_count, require_positive

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


class HubCheckpoint:
    """A `ModelFile` in a directory, in one safetensors file or in shards with an index."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self._json = _read_json(path / "config.json")
        self.config = self._read_config(name)
        self._files = _tensor_files(path)
        self.fingerprint = _fingerprint(path, sorted(set(self._files.values())))

    def has(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"{self.path.name}: tensor {name} is missing")
        try:
            with safe_open(self.path / file, framework="pt") as tensors:
                tensor: torch.Tensor = tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.path / file}: cannot read tensor {name} ({error})") from error
        check_shape(self.path, name, tensor.shape, shape)
        return tensor.float()

    def stored_bits(self, name: str) -> int | None:
        return None

    def tensor_4_bits(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        raise ModelError(f"{self.path.name}: tensor {name} is not stored in 4 bits")

    def vocabulary(self) -> list[str]:
        path = self.path / "tokenizer.json"
        tokenizer = _read_json(path)
        try:
            ids: dict[str, int] = dict(tokenizer["model"]["vocab"])
            ids.update((token["content"], token["id"]) for token in tokenizer["added_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{path}: no vocabulary of a byte-level BPE tokenizer ({error!r})") from error
        return sorted(ids, key=lambda token: ids[token])

    def _value(self, key: str, default: Any = None) -> Any:
        value = self._json.get(key, default)
        if value is None:
            raise ModelError(f"{self.path / 'config.json'}: {key} is missing")
        return value

    def _number(self, key: str, default: float | None = None) -> float:
        return float(require_positive(self._source, key, self._value(key, default)))

    def _count(self, key: str, default: int | None = None) -> int:
        return require_count(self._source, key, self._value(key, default))

    @property
    def _source(self) -> str:
        return str(self.path / "config.json")

    def _object(self, key: str) -> dict[str, Any]:
        value = self._json.get(key) or {}
        if not isinstance(value, dict):
            raise ModelError(f"{self._source}: {key} is {value!r}, expected an object")
        return value

    def _read_config(self, name: str) -> ModelConfig:
        architecture = self._value("model_type")
        if architecture not in ARCHITECTURES:
            allowed = ", ".join(ARCHITECTURES)
            raise ModelError(
                f"{self.path.name}: model_type {architecture!r} is unknown; served are {allowed}"
            )
        self._refuse_what_is_not_computed()
        heads, hidden = self._count("num_attention_heads"), self._count("hidden_size")
        rope = self._object("rope_parameters")
        scaling = self._rope_scaling(self._object("rope_scaling") or rope)
        return ModelConfig(
            name=name,
            architecture=architecture,
            num_layers=self._count("num_hidden_layers"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=self._count("num_key_value_heads", heads),
            head_dim=self._count("head_dim", hidden // heads),
            intermediate_size=self._count("intermediate_size"),
            vocab_size=self._count("vocab_size"),
            max_position=self._max_position(scaling),
            rms_norm_eps=self._number("rms_norm_eps", 1e-6),
            rope_theta=self._number("rope_theta", rope.get("rope_theta") or 10_000.0),
            rope_scaling=scaling,
            tie_embeddings=self._json.get("tie_word_embeddings", False),
            eos_token_ids=self._eos_token_ids(),
        ).validate()

    def _refuse_what_is_not_computed(self) -> None:
        if self._json.get("quantization_config"):
            raise ModelError(f"{self.path.name}: quantised safetensors are not served; use a GGUF file")
        for key, served in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
            if (value := self._json.get(key, served)) != served:
                raise ModelError(f"{self.path.name}: {key} {value!r} is not served, only {served!r}")

    def _max_position(self, scaling: RopeScaling | None) -> int:
        """Attention here sees the whole context, so a sliding window bounds what is exact."""
        positions = self._count("max_position_embeddings")
        if scaling is not None and scaling.kind in ("linear", "yarn"):
            # The file has the context before it was stretched, or with yarn the one after.
            trained = positions if scaling.kind == "linear" else scaling.original_max_position
            positions = max(positions, int(trained * scaling.factor))
        uses_window = self._json.get("use_sliding_window", self._json["model_type"] == "mistral")
        window: int | None = self._json.get("sliding_window")
        return min(positions, window) if uses_window and window else positions

    def _rope_scaling(self, rope: dict[str, Any]) -> RopeScaling | None:
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind == "default":
            return None

        def number(key: str, default: float | None) -> float:
            value = rope.get(key)
            return float(require_positive(self._source, f"rope {key}", default if value is None else value))

        original = "original_max_position_embeddings"
        return RopeScaling(
            kind=kind,
            factor=number("factor", None),
            low_freq_factor=number("low_freq_factor", 1.0),
            high_freq_factor=number("high_freq_factor", 4.0),
            original_max_position=int(number(original, self._count("max_position_embeddings"))),
            beta_fast=number("beta_fast", 32.0),
            beta_slow=number("beta_slow", 1.0),
            attention_factor=number("attention_factor", None) if rope.get("attention_factor") else None,
        )

    def _eos_token_ids(self) -> tuple[int, ...]:
        generation = self.path / "generation_config.json"
        ids = _read_json(generation).get("eos_token_id") if generation.is_file() else None
        if ids is None:
            ids = self._json.get("eos_token_id")
        return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content


def _tensor_files(path: Path) -> dict[str, str]:
    """Tensor name to file name."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = _read_json(index).get("weight_map")
        if not isinstance(files, dict):
            raise ModelError(f"{index}: weight_map is missing")
        return files
    names: dict[str, str] = {}
    for file in sorted(path.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as tensors:
                names.update(dict.fromkeys(tensors.keys(), file.name))
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: truncated or damaged safetensors file ({error})") from error
    if not names:
        raise ModelError(f"{path} holds no .safetensors file")
    return names


def _fingerprint(path: Path, files: list[str]) -> str:
    """Sizes and heads of the files; a head lists every tensor with its shape and place."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for name in files:
        try:
            with (path / name).open("rb") as file:
                digest.update(f"{name}:{(path / name).stat().st_size}".encode() + file.read(1 << 20))
        except OSError as error:
            raise ModelError(f"{path / name} cannot be read ({error})") from error
    return digest.hexdigest()[:16]
