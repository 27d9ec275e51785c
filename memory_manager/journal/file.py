"""A journal file: a header, then records, each with its own checksum and padded to 8 bytes.

header   8 bytes "NEXUSKV\\0", uint32 version, uint32 zero
record   uint32 magic, uint32 kind, uint32 size, uint32 CRC-32 of kind, size and payload; payload; zeros
"""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from memory_manager.errors import MemoryManagerError

_HEADER = struct.pack("<8sII", b"NEXUSKV\0", 1, 0)
_RECORD_HEAD = struct.Struct("<IIII")
_CHECKED = struct.Struct("<II")
_MAGIC = 0x4A564B4E


class DamagedRecordError(Exception):
    """What follows this offset cannot be trusted."""

    def __init__(self, offset: int, what: str) -> None:
        super().__init__(what)
        self.offset = offset


class JournalCorruptError(MemoryManagerError):
    """A journal whose middle is damaged. It is not used; it can be repaired by losing its end."""

    def __init__(self, path: Path, offset: int, what: str, has_snapshot: bool) -> None:
        super().__init__("JOURNAL_CORRUPT", f"{path}: {what} at byte {offset}")
        self.path = path
        self.offset = offset
        self.has_snapshot = has_snapshot  # before the damage


class JournalUnavailableError(MemoryManagerError):
    """The journal cannot be written; what was done is not answered before it can."""

    def __init__(self, message: str) -> None:
        super().__init__("JOURNAL_UNAVAILABLE", message)


class Record(NamedTuple):
    kind: int
    payload: memoryview
    end: int  # offset of the next record


def encode_record(kind: int, payload: bytes) -> bytes:
    checksum = zlib.crc32(payload, zlib.crc32(_CHECKED.pack(kind, len(payload))))
    head = _RECORD_HEAD.pack(_MAGIC, kind, len(payload), checksum)
    return b"".join((head, payload, bytes(-len(payload) % 8)))


def read_records(path: Path) -> Iterator[Record]:
    """All whole records; stops before a torn tail (the last write before a crash).

    Raises DamagedRecordError when a damaged record is followed by a whole one, or the header is wrong.
    """
    buffer = memoryview(path.read_bytes())
    if buffer[: len(_HEADER)] != _HEADER:
        raise DamagedRecordError(0, "no journal header")
    offset = len(_HEADER)
    while (record := _record_at(buffer, offset)) is not None:
        yield record
        offset = record.end
    if _has_record_after(buffer, offset):
        raise DamagedRecordError(offset, "a damaged record")


def _record_at(buffer: memoryview, offset: int) -> Record | None:
    """The record that starts here, if it is whole."""
    start = offset + _RECORD_HEAD.size
    if start > len(buffer):
        return None
    magic, kind, size, checksum = _RECORD_HEAD.unpack_from(buffer, offset)
    end = start + size + -size % 8
    if magic != _MAGIC or end > len(buffer):
        return None
    payload = buffer[start : start + size]
    if zlib.crc32(payload, zlib.crc32(_CHECKED.pack(kind, size))) != checksum:
        return None
    return Record(kind, payload, end)


def _has_record_after(buffer: memoryview, offset: int) -> bool:
    """Whether a whole record starts anywhere behind a damaged one."""
    data = bytes(buffer[offset:])
    magic = struct.pack("<I", _MAGIC)
    position = data.find(magic, 1)
    while position >= 0:
        if position % 8 == 0 and _record_at(buffer, offset + position) is not None:
            return True
        position = data.find(magic, position + 1)
    return False


class JournalFile:
    """A file to append to. Nothing is in it before `commit`."""

    def __init__(self, path: Path, size: int | None = None) -> None:
        """Cuts an existing file at `size`, or makes a new one, readable by its owner only.

        Raises JournalUnavailableError.
        """
        self.path = path
        flags = os.O_WRONLY | (os.O_CREAT | os.O_EXCL if size is None else 0)
        try:
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise JournalUnavailableError(f"{path}: {error}") from error
        self._pending: list[bytes] = []
        if size is None:
            self.size = 0
            self._pending.append(_HEADER)
        else:
            os.fchmod(self._descriptor, 0o600)
            os.ftruncate(self._descriptor, size)
            os.lseek(self._descriptor, size, os.SEEK_SET)
            self.size = size

    def append(self, kind: int, payload: bytes) -> None:
        self._pending.append(encode_record(kind, payload))

    def commit(self) -> None:
        """Gives everything appended to the operating system.

        Raises JournalUnavailableError; then nothing has been written, and the next commit tries again.
        """
        if not self._pending:
            return
        data = memoryview(b"".join(self._pending))
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            os.ftruncate(self._descriptor, self.size)
            os.lseek(self._descriptor, self.size, os.SEEK_SET)
            raise JournalUnavailableError(f"{self.path}: {error}") from error
        self.size += sum(map(len, self._pending))
        self._pending.clear()

    def sync(self) -> None:
        """Waits until the disk has it. Raises JournalUnavailableError."""
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            raise JournalUnavailableError(f"{self.path}: {error}") from error

    def close(self) -> None:
        os.close(self._descriptor)
