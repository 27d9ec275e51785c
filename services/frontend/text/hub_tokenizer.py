"""The tokenizer of a model directory: tokenizer.json, tokenizer_config.json, generation_config.json."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from services.frontend.text.byte_level import piece_bytes
from services.frontend.text.errors import ModelTextError
from services.frontend.text.tokenizer import Tokenizer, Vocabulary


def load(directory: Path) -> Tokenizer:
    """Reads the directory's tokenizer. Raises ModelTextError when files are missing or of an unknown kind."""
    path = directory / "tokenizer.json"
    try:
        text = path.read_text()
        backend = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises bare Exception for a malformed file
        raise ModelTextError(f"cannot read {path}: {error}") from error
    # What a training script had set for its batches is not for prompts.
    backend.no_truncation()
    backend.no_padding()
    config = read_json(directory / "tokenizer_config.json")
    decode_piece, space_prefix = _piece_decoder(path, json.loads(text).get("decoder"))
    added = backend.get_added_tokens_decoder()
    pieces = [b""] * (max(backend.get_vocab(with_added_tokens=True).values()) + 1)
    for piece, token_id in backend.get_vocab(with_added_tokens=True).items():
        pieces[token_id] = piece.encode() if token_id in added else decode_piece(piece)
    bos_id = backend.token_to_id(token_content(config.get("bos_token")) or "")
    prefix = backend.encode("", add_special_tokens=True).ids
    return Tokenizer(
        backend,
        Vocabulary(
            pieces=pieces,
            control_ids=frozenset(token_id for token_id, token in added.items() if token.special),
            end_ids=_end_ids(directory, backend, config),
            bos_id=bos_id,
            add_bos=bos_id is not None and prefix[:1] == [bos_id],
            space_prefix=space_prefix,
        ),
    )


def read_json(path: Path) -> dict[str, Any]:
    """The file's object, empty when there is no such file. Raises ModelTextError when it is damaged."""
    try:
        value = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ModelTextError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelTextError(f"{path} must hold a JSON object")
    return value


def token_content(token: Any) -> str | None:
    """A special token is spelt as a string or as an object with `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _piece_decoder(path: Path, decoder: Mapping[str, Any] | None) -> tuple[Callable[[str], bytes], bool]:
    kinds = {part["type"]: part for part in _parts(decoder or {})}
    if "ByteLevel" in kinds:
        return piece_bytes, False
    if "ByteFallback" in kinds or "Metaspace" in kinds:
        return _sentencepiece_bytes, "Strip" in kinds or "Metaspace" in kinds
    raise ModelTextError(f"{path}: only byte-level and byte-fallback tokenizers are supported")


def _parts(decoder: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [part for inner in decoder["decoders"] for part in _parts(inner)]
    return [decoder] if decoder else []


def _sentencepiece_bytes(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def _end_ids(directory: Path, backend: tokenizers.Tokenizer, config: Mapping[str, Any]) -> tuple[int, ...]:
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id")
        ids += [value] if isinstance(value, int) else value or []
    eos_id = backend.token_to_id(token_content(config.get("eos_token")) or "")
    return tuple(dict.fromkeys([*ids, *([] if eos_id is None else [eos_id])]))
