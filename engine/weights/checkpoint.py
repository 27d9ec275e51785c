"""A checkpoint: a configuration and named tensors, from whatever file format."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch

from engine.errors import ModelError
from engine.model.config import ModelConfig

DEFAULT_MODEL = "smollm2-135m-instruct"


class Checkpoint(Protocol):
    """Tensors carry their Hugging Face names and layout, whatever the file calls them."""

    config: ModelConfig
    path: Path
    fingerprint: str  # names the weights: equal for equal files

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """float32, of exactly that shape. Raises ModelError naming a missing or misshapen tensor."""
        ...

    def has(self, name: str) -> bool: ...

    def stored_bits(self, name: str) -> int | None:
        """4 or 8 if the file stores this matrix in groups of 32 numbers of so many bits."""
        ...

    def tensor_4_bits(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        """A matrix [N, K] of 4 bits as it is stored: uint8 [N, K / 32 * 20], in GGUF's Q4_1 blocks: scale and
        minimum as float16, then 16 bytes, numbers 0 to 15 in their low halves, 16 to 31 in the high ones."""
        ...


class ModelFile(Checkpoint, Protocol):
    """A checkpoint that comes with its tokenizer."""

    def vocabulary(self) -> list[str]:
        """Every token as the tokenizer spells it, by id. Raises ModelError."""
        ...


def check_shape(path: Path, name: str, found: Iterable[int], wanted: tuple[int, ...]) -> None:
    found = tuple(found)
    if found != wanted:
        raise ModelError(f"{path.name}: tensor {name} has shape {list(found)}, expected {list(wanted)}")


def require_positive(source: str, key: str, value: object) -> Any:
    """The value, a finite number above 0. Raises ModelError naming the key."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{source}: {key} is {value!r}, expected a number above 0")
    return value


def require_count(source: str, key: str, value: object) -> int:
    """The value, a whole number above 0. Raises ModelError naming the key."""
    count = require_positive(source, key, value)
    if not isinstance(count, int):
        raise ModelError(f"{source}: {key} is {value!r}, expected a whole number")
    return count
