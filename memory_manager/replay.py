"""A journal as a trace: what the same requests would have hit with another pool, or under other rules."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from memory_manager.answers import AcquireStatus, UpdateAnswer
from memory_manager.codec import Reader, decode_answer, decode_update
from memory_manager.config import MemoryConfig
from memory_manager.core.layout import BLOCK_SIZE
from memory_manager.draft_index import DraftIndex
from memory_manager.engine_pool import EnginePool
from memory_manager.journal.file import read_records
from memory_manager.journal.records import Kind
from memory_manager.journal.snapshot import pool_sizes
from memory_manager.requests import Acquire, Advance, Fork, Release, Room, UpdateRequest

_NEVER_WAIT = 1 << 30


@dataclass
class Replayed:
    """Sums over all engines of the trace."""

    num_blocks: int  # of each engine's pool
    num_acquires: int = 0  # granted when the journal was written
    num_refused: int = 0  # of these, short of blocks now
    num_preempted: int = 0  # sequences that got no room to go on
    num_query_tokens: int = 0
    num_hit_tokens: int = 0
    num_evictions: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that were found in the cache; None without any."""
        return self.num_hit_tokens / self.num_query_tokens if self.num_query_tokens else None


def replay(path: Path, num_blocks: int, config: MemoryConfig | None = None) -> Replayed:
    """Runs the calls of a journal file on empty pools of `num_blocks`, under `config`.

    Waiting for prefixes has happened already: a request comes when it was granted.
    """
    config = replace(
        config or MemoryConfig(), min_wait_blocks=_NEVER_WAIT, journal=None, draft_index_tokens=0
    )
    engines: dict[int, _TracedEngine] = {}
    result = Replayed(num_blocks)
    for record in read_records(path):
        if record.kind == Kind.UPDATE:
            update = decode_update(record.payload)
            epoch = update.request.epoch
            if epoch not in engines:
                engines[epoch] = _TracedEngine(num_blocks, config, result)
            engines[epoch].follow(update.request, decode_answer(Reader(update.answer)), update.now_us)
    for engine in engines.values():
        engine.add_up()
    return result


def recorded_num_blocks(path: Path) -> int:
    """Blocks of the largest pool in a journal file; 0 when there is none."""
    sizes = [0]
    for record in read_records(path):
        if record.kind == Kind.SNAPSHOT:
            sizes += pool_sizes(record.payload)
        elif record.kind == Kind.REGISTER:
            sizes.append(json.loads(bytes(record.payload))["num_blocks"])
    return max(sizes)


def miss_ratio_curve(
    path: Path, sizes: Iterable[int], config: MemoryConfig | None = None
) -> list[tuple[int, float]]:
    """(pool size in blocks, share of the prompt tokens that missed) for each size."""
    return [(size, 1 - (replay(path, size, config).hit_rate or 0.0)) for size in sizes]


@dataclass
class _Sequence:
    num_tokens: int
    num_written: int
    num_slots: int


class _TracedEngine:
    """Says what an engine said, as far as the sequences it speaks of live here too. Always idle."""

    def __init__(self, num_blocks: int, config: MemoryConfig, result: Replayed) -> None:
        self._pool = EnginePool("replay", 1, num_blocks, "", bytes(64), config, DraftIndex(0))
        self._result = result
        self._sequences: dict[int, _Sequence] = {}
        self._now_us = 0

    def follow(self, request: UpdateRequest, answer: UpdateAnswer, now_us: int) -> None:
        self._now_us = now_us
        if request.advance.sequence_ids.size:
            self._advance(request.advance)
        if request.release.sequence_ids.size:
            self._release(request.release.sequence_ids.tolist())
        for parent_id, child_id in zip(*map(np.ndarray.tolist, request.fork), strict=True):
            if parent_id in self._sequences:
                self._fork(parent_id, child_id)
        for acquire, result in zip(request.acquires, answer.acquires, strict=True):
            if result.status is AcquireStatus.GRANTED:
                self._acquire(acquire)

    def add_up(self) -> None:
        counters = self._pool.tables.pool.counters
        self._result.num_query_tokens += int(counters["num_query_tokens"][0])
        self._result.num_hit_tokens += int(counters["num_hit_tokens"][0])
        self._result.num_evictions += int(counters["num_evictions"][0])

    def _call(self, **lists: Any) -> UpdateAnswer:
        op_seq = self._pool.last_call.op_seq + 1
        return self._pool.update(UpdateRequest(1, op_seq, **lists), self._now_us)

    def _advance(self, advance: Advance) -> None:
        """A sequence that gets no room for its tokens is preempted."""
        ends = np.cumsum(advance.num_tokens)
        for i, sequence_id in enumerate(advance.sequence_ids.tolist()):
            sequence = self._sequences.get(sequence_id)
            if sequence is None:
                continue
            tokens = advance.tokens[ends[i] - advance.num_tokens[i] : ends[i]]
            ids, size = np.array([sequence_id]), np.array([tokens.size], np.int32)
            sequence.num_slots += BLOCK_SIZE * self._call(room=Room(ids, size)).room.blocks.size
            sequence.num_tokens += tokens.size
            sequence.num_written = max(sequence.num_written, int(advance.num_written[i]))
            if sequence.num_tokens <= sequence.num_slots:
                num_written = np.array([sequence.num_written], np.int32)
                self._call(advance=Advance(ids, size, tokens, num_written))
            else:
                self._release([sequence_id])
                self._result.num_preempted += 1

    def _release(self, sequence_ids: list[int]) -> None:
        self._call(release=Release(np.array(sequence_ids)))
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)

    def _fork(self, parent_id: int, child_id: int) -> None:
        answer = self._call(fork=Fork(np.array([parent_id]), np.array([child_id])))
        if answer.fork.granted[0]:
            parent = self._sequences[parent_id]
            num_slots = BLOCK_SIZE * -(-parent.num_tokens // BLOCK_SIZE)
            self._sequences[child_id] = replace(parent, num_slots=num_slots)

    def _acquire(self, acquire: Acquire) -> None:
        (result,) = self._call(acquires=(acquire,)).acquires
        self._result.num_acquires += 1
        if result.status is AcquireStatus.GRANTED:
            self._sequences[acquire.sequence_id] = _Sequence(
                acquire.tokens.size, result.num_cached, BLOCK_SIZE * result.block_table.size
            )
        else:
            self._result.num_refused += 1
