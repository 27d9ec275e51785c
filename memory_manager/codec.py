"""Updates and answers as bytes. int64 columns come first, everything starts on a multiple of 8 bytes."""

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from memory_manager.answers import (
    AcquireResult,
    AcquireStatus,
    AdvanceResult,
    ForkResult,
    RoomResult,
    UpdateAnswer,
)
from memory_manager.columns import INT32, INT64, NO_INT32S, NO_INT64S
from memory_manager.requests import Acquire, Advance, Fork, Release, Room, Truncate, UpdateRequest

_REQUEST_HEAD = struct.Struct("<4q14i")  # epoch, op_seq, steps; sizes of 12 columns, acquires, unused
_ACQUIRE_HEAD = struct.Struct("<q6i")  # id; priority, match_prefix, sizes of tokens, tenant, salt, adapter
_ANSWER_HEAD = struct.Struct("<18i")  # sizes of 14 columns, acquires; free, fenced, evictable
_RESULT_HEAD = struct.Struct("<6i")  # status, size of the table, cached, needed, limit, unused
_NUM_REQUEST_INT64S = 6
_NUM_ANSWER_INT64S = 3


def encode_request(request: UpdateRequest) -> bytes:
    advance, truncate, fork, room = request.advance, request.truncate, request.fork, request.room
    columns = (
        advance.sequence_ids,
        truncate.sequence_ids,
        request.release.sequence_ids,
        fork.parent_ids,
        fork.child_ids,
        room.sequence_ids,
        advance.num_tokens,
        advance.tokens,
        advance.num_written,
        advance.num_drafts,
        truncate.num_blocks_kept,
        room.num_tokens_ahead,
    )
    parts = [
        _REQUEST_HEAD.pack(
            request.epoch,
            request.op_seq,
            request.launched_step,
            request.completed_step,
            *[column.size for column in columns],
            len(request.acquires),
            0,
        ),
        *[column.tobytes() for column in columns if column.size],
    ]
    _pad(parts)
    for acquire in request.acquires:
        parts += _encode_acquire(acquire)
    return b"".join(parts)


def _encode_acquire(acquire: Acquire) -> list[bytes]:
    texts = [text.encode() for text in (acquire.tenant, acquire.salt, acquire.adapter)]
    parts = [
        _ACQUIRE_HEAD.pack(
            acquire.sequence_id,
            acquire.priority,
            acquire.match_prefix,
            acquire.tokens.size,
            *map(len, texts),
        ),
        acquire.tokens.tobytes(),
        *texts,
    ]
    _pad(parts)
    return parts


def _pad(parts: list[bytes]) -> None:
    parts.append(bytes(-sum(map(len, parts)) % 8))


class Reader:
    """Takes values off the front of a buffer that starts on a multiple of 8 bytes."""

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._offset = 0

    def unpack(self, format: struct.Struct) -> tuple[Any, ...]:
        values = format.unpack_from(self._buffer, self._offset)
        self._offset += format.size
        return values

    def column(self, dtype: np.dtype[Any], size: int) -> npt.NDArray[Any]:
        """A read-only view."""
        if size == 0:
            return NO_INT64S if dtype is INT64 else NO_INT32S
        column = np.frombuffer(self._buffer, dtype, size, self._offset)
        self._offset += column.nbytes
        return column

    def columns(self, num_int64s: int, sizes: list[int]) -> list[npt.NDArray[Any]]:
        """Read-only views, the first of int64, the others of int32."""
        columns = self._cut(INT64, sizes[:num_int64s]) + self._cut(INT32, sizes[num_int64s:])
        self.align()
        return columns

    def _cut(self, dtype: np.dtype[Any], sizes: list[int]) -> list[npt.NDArray[Any]]:
        empty: npt.NDArray[Any] = NO_INT64S if dtype is INT64 else NO_INT32S
        whole = self.column(dtype, sum(sizes))
        columns, start = [], 0
        for size in sizes:
            columns.append(whole[start : start + size] if size else empty)
            start += size
        return columns

    def text(self, num_bytes: int) -> str:
        start = self._offset
        self._offset += num_bytes
        return str(self._buffer[start : self._offset], "utf-8")

    def align(self) -> None:
        self._offset += -self._offset % 8


def decode_request(reader: Reader) -> UpdateRequest:
    epoch, op_seq, launched, completed, *rest = reader.unpack(_REQUEST_HEAD)
    *sizes, num_acquires, _ = rest
    columns = reader.columns(_NUM_REQUEST_INT64S, sizes)
    advance_ids, truncate_ids, release_ids, parent_ids, child_ids, room_ids = columns[:_NUM_REQUEST_INT64S]
    num_tokens, tokens, num_written, num_drafts, num_kept, num_ahead = columns[_NUM_REQUEST_INT64S:]
    return UpdateRequest(
        epoch=epoch,
        op_seq=op_seq,
        launched_step=launched,
        completed_step=completed,
        advance=Advance(advance_ids, num_tokens, tokens, num_written, num_drafts),
        truncate=Truncate(truncate_ids, num_kept),
        release=Release(release_ids),
        fork=Fork(parent_ids, child_ids),
        room=Room(room_ids, num_ahead),
        acquires=tuple(_decode_acquire(reader) for _ in range(num_acquires)),
    )


def _decode_acquire(reader: Reader) -> Acquire:
    sequence_id, priority, match_prefix, num_tokens, *sizes = reader.unpack(_ACQUIRE_HEAD)
    tokens = reader.column(INT32, num_tokens)
    tenant, salt, adapter = [reader.text(size) for size in sizes]
    reader.align()
    return Acquire(sequence_id, tokens, tenant, salt, adapter, priority, bool(match_prefix))


def encode_answer(answer: UpdateAnswer) -> bytes:
    advance, fork, room = answer.advance, answer.fork, answer.room
    columns = (
        advance.replaced_sequence_ids,
        advance.draft_sequence_ids,
        answer.wake,
        advance.replaced_indices,
        advance.replaced_blocks,
        advance.draft_base_lengths,
        advance.num_draft_tokens,
        advance.draft_tokens,
        *fork,
        *room,
    )
    parts = [
        _ANSWER_HEAD.pack(
            *[column.size for column in columns],
            len(answer.acquires),
            answer.num_free,
            answer.num_fenced,
            answer.num_evictable,
        ),
        *[column.tobytes() for column in columns if column.size],
    ]
    _pad(parts)
    for result in answer.acquires:
        parts += [
            _RESULT_HEAD.pack(
                result.status,
                result.block_table.size,
                result.num_cached,
                result.num_needed,
                result.num_limit,
                0,
            ),
            result.block_table.tobytes(),
        ]
        _pad(parts)
    return b"".join(parts)


def decode_answer(reader: Reader) -> UpdateAnswer:
    *sizes, num_acquires, num_free, num_fenced, num_evictable = reader.unpack(_ANSWER_HEAD)
    columns = reader.columns(_NUM_ANSWER_INT64S, sizes)
    replaced_ids, draft_ids, wake, *rest = columns
    return UpdateAnswer(
        advance=AdvanceResult(replaced_ids, rest[0], rest[1], draft_ids, *rest[2:5]),
        fork=ForkResult(*rest[5:9]),
        room=RoomResult(*rest[9:11]),
        acquires=tuple(_decode_result(reader) for _ in range(num_acquires)),
        wake=wake,
        num_free=num_free,
        num_fenced=num_fenced,
        num_evictable=num_evictable,
    )


def _decode_result(reader: Reader) -> AcquireResult:
    status, num_blocks, num_cached, num_needed, num_limit, _ = reader.unpack(_RESULT_HEAD)
    table = reader.column(INT32, num_blocks)
    reader.align()
    return AcquireResult(AcquireStatus(status), table, num_cached, num_needed, num_limit)


class UpdateRecord(NamedTuple):
    """One executed call."""

    now_us: int
    request: UpdateRequest
    answer: memoryview  # encoded


_UPDATE_HEAD = struct.Struct("<qq")  # time, size of the request


def encode_update(now_us: int, request: UpdateRequest, answer: UpdateAnswer) -> bytes:
    body = encode_request(request)
    return b"".join((_UPDATE_HEAD.pack(now_us, len(body)), body, encode_answer(answer)))


def decode_update(payload: memoryview) -> UpdateRecord:
    now_us, num_bytes = _UPDATE_HEAD.unpack_from(payload)
    start = _UPDATE_HEAD.size
    request = decode_request(Reader(payload[start : start + num_bytes]))
    return UpdateRecord(now_us, request, payload[start + num_bytes :])
