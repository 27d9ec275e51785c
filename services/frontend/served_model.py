"""What the frontend knows about the model that the engine serves."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nexuskv.v1 import engine_pb2
from services.frontend.text import gguf_tokenizer, hub_tokenizer
from services.frontend.text.chat_template import ChatTemplate
from services.frontend.text.errors import ModelTextError
from services.frontend.text.gguf_metadata import read_metadata
from services.frontend.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

ALIAS = "nexuskv-engine-v1"
_SPECIAL_TOKENS = ("bos", "eos", "unk", "unknown", "pad", "padding")


@dataclass(frozen=True)
class ServedModel:
    """One model: its numbers, its tokenizer and its chat template (None: it cannot chat)."""

    info: engine_pb2.GetEngineInfoResponse
    tokenizer: Tokenizer
    template: ChatTemplate | None
    longest_piece: int  # bytes of the longest token
    loaded_at: float  # seconds since the epoch

    @property
    def name(self) -> str:
        return self.info.model

    def serves(self, name: str) -> bool:
        return name in (self.info.model, ALIAS)


def load(info: engine_pb2.GetEngineInfoResponse) -> ServedModel:
    """Reads tokenizer and template from the engine's model path. Blocks; raises ModelTextError."""
    path = Path(info.model_path)
    if path.is_dir():
        tokenizer, template = _from_directory(path)
    elif path.is_file():
        tokenizer, template = _from_gguf(path)
    else:
        raise ModelTextError(f"the engine's model path {path} does not exist here")
    return ServedModel(info, tokenizer, template, max(map(len, tokenizer.pieces)), time.time())


def _from_gguf(path: Path) -> tuple[Tokenizer, ChatTemplate | None]:
    metadata = read_metadata(path)
    tokenizer = gguf_tokenizer.build(metadata)
    keys = gguf_tokenizer.tokenizer_keys(metadata)
    special = {
        f"{name}_token": keys["tokens"][token_id]
        for name in _SPECIAL_TOKENS
        if (token_id := gguf_tokenizer.special_id(keys, name)) is not None
    }
    return tokenizer, _template(metadata.get("tokenizer.chat_template"), special)


def _from_directory(path: Path) -> tuple[Tokenizer, ChatTemplate | None]:
    tokenizer = hub_tokenizer.load(path)
    config = hub_tokenizer.read_json(path / "tokenizer_config.json")
    file = path / "chat_template.jinja"
    source = file.read_text() if file.is_file() else _named_template(config.get("chat_template"))
    special = {
        name: content
        for name, token in config.items()
        if name.endswith("_token") and (content := hub_tokenizer.token_content(token)) is not None
    }
    return tokenizer, _template(source, special)


def _template(source: str | None, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """A model whose template is of no use still completes text."""
    if not source:
        return None
    try:
        return ChatTemplate(source, special_tokens)
    except ModelTextError as error:
        logger.warning("%s; the model cannot chat", error)
        return None


def _named_template(value: Any) -> str | None:
    """A template is a string or a list of named ones, of which `default` is ours."""
    if isinstance(value, list):
        value = next((entry.get("template") for entry in value if entry.get("name") == "default"), None)
    return value if isinstance(value, str) else None
