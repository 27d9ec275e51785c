"""Reads the google.rpc error details of a failed call.

Their few fields are read from the wire format itself, so the client needs no package for these messages.
"""

from collections.abc import Iterator
from typing import NamedTuple

import grpc.aio

_METADATA_KEY = "grpc-status-details-bin"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_NANOSECONDS = 1e9


class ErrorDetails(NamedTuple):
    reason: str | None = None
    field: str | None = None
    retry_after_s: float | None = None


def error_details(error: grpc.aio.AioRpcError) -> ErrorDetails:
    """What the trailing metadata says; empty when there is nothing or it does not parse."""
    for key, value in error.trailing_metadata() or ():
        if key == _METADATA_KEY and isinstance(value, bytes):
            try:
                return _from_status(value)
            except (IndexError, ValueError):
                break
    return ErrorDetails()


def _from_status(data: bytes) -> ErrorDetails:
    """google.rpc.Status: code = 1, message = 2, details = 3 (Any: type_url = 1, value = 2)."""
    details = ErrorDetails()
    for detail in _messages(data, 3):
        name, value = _bytes(detail, 1).decode().rpartition("/")[2], _bytes(detail, 2)
        if name == "google.rpc.ErrorInfo":
            details = details._replace(reason=_bytes(value, 1).decode())
        elif name == "google.rpc.BadRequest":
            violation = next(_messages(value, 1), b"")
            details = details._replace(field=_bytes(violation, 1).decode())
        elif name == "google.rpc.RetryInfo":
            delay = _bytes(value, 1)
            seconds = _number(delay, 1) + _number(delay, 2) / _NANOSECONDS
            details = details._replace(retry_after_s=seconds)
    return details


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message in wire order: number, and a varint or the bytes."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
        elif kind in (_BYTES, _FIXED32, _FIXED64):
            length, at = _varint(data, at) if kind == _BYTES else (4 if kind == _FIXED32 else 8, at)
            yield tag >> 3, data[at : at + length]
            at += length
        else:
            raise ValueError(f"wire type {kind}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _messages(data: bytes, number: int) -> Iterator[bytes]:
    return (value for n, value in _fields(data) if n == number and isinstance(value, bytes))


def _bytes(data: bytes, number: int) -> bytes:
    return next(_messages(data, number), b"")


def _number(data: bytes, number: int) -> int:
    return next((value for n, value in _fields(data) if n == number and isinstance(value, int)), 0)
