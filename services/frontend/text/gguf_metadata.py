"""The key-value part of a GGUF file, read without touching its tensors.

A vocabulary of 50,000 strings takes some tens of milliseconds this way; a reader that also lays out the
tensors takes seconds.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

from services.frontend.text.errors import ModelTextError

_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_BOOL, _STRING, _ARRAY = 7, 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "?", 10: "Q", 11: "q", 12: "d"}


def read_metadata(path: Path) -> dict[str, Any]:
    """Every key of the file's header. Raises ModelTextError when it is not a readable GGUF file."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).metadata()
    except (OSError, ValueError) as error:
        raise ModelTextError(f"cannot read {path}: {error}") from error
    except (struct.error, KeyError) as error:
        raise ModelTextError(f"{path} is damaged: its GGUF header does not parse") from error


class _Cursor:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def metadata(self) -> dict[str, Any]:
        if self._data[:4] != _MAGIC:
            raise ValueError("it is not a GGUF file")
        self._at = 4
        version = self._scalar("I")
        if version not in _SUPPORTED_VERSIONS:
            raise ValueError(f"GGUF version {version} is not supported")
        self._scalar("Q")  # number of tensors
        num_keys = self._scalar("Q")
        return {self._string(): self._value(self._scalar("I")) for _ in range(num_keys)}

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"))
        return self._scalar(_FORMATS[kind])

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind in (_STRING, _ARRAY):
            return [self._value(kind) for _ in range(length)]
        layout = struct.Struct(f"<{length}{_FORMATS[kind]}")
        values = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return list(values)

    def _string(self) -> str:
        length = self._scalar("Q")
        start, self._at = self._at, self._at + length
        if self._at > len(self._data):
            raise struct.error("string runs past the end")
        return self._data[start : self._at].decode("utf-8", "replace")

    def _scalar(self, format: str) -> Any:
        layout = struct.Struct("<" + format)
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return value
