"""One engine's pool: executes its updates. Names become rows here; the core knows numbers only."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from memory_manager.answers import (
    NO_ADVANCE_RESULT,
    NO_FORK_RESULT,
    NO_ROOM_RESULT,
    AcquireResult,
    AcquireStatus,
    AdvanceResult,
    ForkResult,
    RoomResult,
    UpdateAnswer,
)
from memory_manager.codec import encode_request
from memory_manager.columns import INT32, INT64, NO_INT64S, Int32s, Int64s
from memory_manager.config import MemoryConfig
from memory_manager.core import acquire as core_acquire
from memory_manager.core import prefixes, updates
from memory_manager.core.checks import Problem
from memory_manager.core.jit import ArgumentTypesError
from memory_manager.core.layout import BLOCK_SIZE, HEADLINE
from memory_manager.core.waiting import take_woken
from memory_manager.draft_index import DraftIndex, PoolTexts
from memory_manager.errors import InvalidRequestError, PreconditionError
from memory_manager.explanations import Explanations
from memory_manager.pins import Pins
from memory_manager.requests import NO_FORK, Acquire, UpdateRequest, check_acquires, columns_of
from memory_manager.tables import Namespace, Tables
from memory_manager.views import Cleared

_NUM_CHANGES, _NOW = HEADLINE.index("num_changes"), HEADLINE.index("now_us")


def _rejection(problem: Problem, sequence_id: int) -> InvalidRequestError:
    if problem is Problem.BAD_STEPS:
        return InvalidRequestError(problem.name, "launched_step >= completed_step, and neither goes back")
    if problem is Problem.BAD_ARRAY_LENGTH:
        return InvalidRequestError(problem.name, "the columns of a list differ in length")
    return InvalidRequestError(problem.name, f"sequence {sequence_id}: {problem.name}")


def _fork_result(done: updates.Executed, num_forks: int, out: Int32s) -> ForkResult:
    copies_at = done.fork_at + num_forks
    src_at = copies_at + num_forks
    dst_at = src_at + done.most_copies
    return ForkResult(
        out[done.fork_at : copies_at],
        out[copies_at:src_at],
        out[src_at : src_at + done.num_copies],
        out[dst_at : dst_at + done.num_copies],
    )


class LastCall(NamedTuple):
    """The call an engine may repeat. The body's digest stands for the body."""

    op_seq: int
    body: UpdateRequest | bytes
    answer: UpdateAnswer | None

    @property
    def digest(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else digest(self.body)


def digest(request: UpdateRequest) -> bytes:
    return hashlib.blake2b(encode_request(request), digest_size=16).digest()


class EnginePool:
    def __init__(
        self,
        engine_id: str,
        epoch: int,
        num_blocks: int,
        model_fingerprint: str,
        secret: bytes,
        config: MemoryConfig,
        drafts: DraftIndex,
    ) -> None:
        """`secret` is 64 bytes that nobody else knows."""
        self.engine_id = engine_id
        self.epoch = epoch
        self.num_blocks = num_blocks
        self.model_fingerprint = model_fingerprint
        self.version = 0  # odd while the arrays are being changed
        self._min_wait_blocks = config.min_wait_blocks
        self.tables = Tables(num_blocks, secret, config)
        self.pins = Pins(self.tables)
        self.explanations = Explanations(self.tables)
        self._texts = PoolTexts(model_fingerprint, self.tables, drafts)
        # Where the core writes answers; one that may not fit gets arrays of its own.
        self._outbox = np.empty(256, INT64), np.empty(8192, INT32)
        self.last_call = LastCall(0, b"", None)

    @contextmanager
    def changing(self, now_us: int) -> Iterator[None]:
        """Around every change."""
        self._begin_change(now_us)
        try:
            yield
        finally:
            self.version += 1

    def _begin_change(self, now_us: int) -> None:
        self.version += 1
        self.tables.headline[_NOW] = now_us

    def configure(self, config: MemoryConfig) -> None:
        self._min_wait_blocks = config.min_wait_blocks
        self.tables.configure(config)

    @property
    def num_changes(self) -> int:
        """Entries in the log of changes."""
        return int(self.tables.headline[_NUM_CHANGES])

    def update(self, request: UpdateRequest, now_us: int) -> UpdateAnswer:
        """Executes a call, or repeats the answer to the last one."""
        if request.op_seq != self.last_call.op_seq + 1:
            return self._repeat(request)
        check_acquires(request.acquires)
        self._begin_change(now_us)
        try:
            answer = self._execute(request)
        finally:
            self.version += 1
        self.last_call = LastCall(request.op_seq, request, answer)
        return answer

    def _repeat(self, request: UpdateRequest) -> UpdateAnswer:
        last = self.last_call
        if request.op_seq != last.op_seq or last.answer is None:
            raise PreconditionError(
                "OP_SEQ_GAP", f"op_seq is {request.op_seq}, the next one is {last.op_seq + 1}"
            )
        if digest(request) != last.digest:
            raise InvalidRequestError(
                "BODY_MISMATCH", f"op_seq {request.op_seq} was sent before with another body"
            )
        return last.answer

    def _new_ids(self, request: UpdateRequest) -> Int64s:
        """The ids of the acquires; together with the forks' children none may occur twice."""
        acquire_ids = [acquire.sequence_id for acquire in request.acquires]
        new_ids = acquire_ids + request.fork.child_ids.tolist()
        if len(set(new_ids)) < len(new_ids):
            raise InvalidRequestError("DUPLICATE_SEQUENCE", "a new sequence id is named twice")
        ids = np.array(acquire_ids, np.int64)
        ids.setflags(write=False)
        return ids

    def _execute(self, request: UpdateRequest) -> UpdateAnswer:
        has_new = bool(request.acquires) or request.fork.child_ids.size > 0
        acquire_ids = self._new_ids(request) if has_new else NO_INT64S
        if has_new:
            self.tables.make_rows(len(request.acquires) + request.fork.child_ids.size)
        advance, fork, room = self._execute_lists(request, acquire_ids)
        acquires = tuple(map(self._acquire, request.acquires)) if has_new else ()
        num_free, num_fenced, num_evictable, num_woken, *_ = self.tables.headline.tolist()
        woken = self._take_woken(num_woken) if num_woken else NO_INT64S
        return UpdateAnswer(advance, fork, room, acquires, woken, num_free, num_fenced, num_evictable)

    def _execute_lists(
        self, request: UpdateRequest, acquire_ids: Int64s
    ) -> tuple[AdvanceResult, ForkResult, RoomResult]:
        """All lists but the acquires. Raises InvalidRequestError, then nothing has been done."""
        replaced_ids, out = self._outbox
        done = self._call_core(request, acquire_ids, replaced_ids, out)
        if done.problem:
            raise _rejection(Problem(done.problem), done.sequence_id)
        if done.most_replaced > replaced_ids.size or done.out_size > out.size:
            replaced_ids, out = np.empty(done.most_replaced, INT64), np.empty(done.out_size, INT32)
            done = self._call_core(request, acquire_ids, replaced_ids, out)
        else:
            out = out[: done.out_size].copy()  # the outbox is used again
        fork, room = NO_FORK_RESULT, NO_ROOM_RESULT
        num_releases = request.release.sequence_ids.size
        if num_releases:
            roots, sizes = out[done.text_at : done.text_at + 2 * num_releases].reshape(2, num_releases)
            self._texts.remember(roots, sizes, out[done.text_at + 2 * num_releases :])
        advance = self._advance_result(request, done, replaced_ids, out)
        if request.fork is not NO_FORK:
            fork = _fork_result(done, request.fork.parent_ids.size, out)
        num_rooms = request.room.sequence_ids.size
        if num_rooms:
            blocks_at = done.room_at + num_rooms
            room = RoomResult(out[done.room_at : blocks_at], out[blocks_at : blocks_at + done.num_room])
        return advance, fork, room

    def _advance_result(
        self, request: UpdateRequest, done: updates.Executed, replaced_ids: Int64s, out: Int32s
    ) -> AdvanceResult:
        result, num_replaced = NO_ADVANCE_RESULT, done.num_replaced
        if num_replaced:
            blocks = out[done.most_replaced : done.most_replaced + num_replaced]
            result = AdvanceResult(replaced_ids[:num_replaced].copy(), out[:num_replaced], blocks)
        if request.advance.num_drafts.size:
            drafts = self._texts.propose(request.advance.sequence_ids, request.advance.num_drafts)
            if drafts is not None:
                result = result._replace(
                    draft_sequence_ids=drafts.sequence_ids,
                    draft_base_lengths=drafts.base_lengths,
                    num_draft_tokens=drafts.num_tokens,
                    draft_tokens=drafts.tokens,
                )
        return result

    def _call_core(
        self, request: UpdateRequest, acquire_ids: Int64s, replaced_ids: Int64s, out: Int32s
    ) -> updates.Executed:
        try:
            return updates.Executed(
                *updates.execute(  # type: ignore[call-arg]
                    self.tables.arrays,
                    request.launched_step,
                    request.completed_step,
                    *columns_of(request),
                    acquire_ids,
                    replaced_ids,
                    out,
                )
            )
        except ArgumentTypesError as error:
            raise InvalidRequestError("BAD_ARRAY", "a column has the wrong type or layout") from error

    def _acquire(self, acquire: Acquire) -> AcquireResult:
        num_needed = -(-acquire.tokens.size // BLOCK_SIZE)
        tenant = self.tables.tenant_row(acquire.tenant)
        num_limit = min(self.num_blocks, int(self.tables.pool.tenants[tenant]["quota"]))
        if num_needed > num_limit:
            return AcquireResult(AcquireStatus.NEVER, num_needed=num_needed, num_limit=num_limit)
        root = self.tables.root_row((acquire.salt, acquire.adapter))
        table: Int32s = np.empty(num_needed, np.int32)
        outcome = core_acquire.acquire(
            self.tables.arrays,
            acquire.sequence_id,
            tenant,
            root,
            acquire.tokens,
            acquire.match_prefix,
            self._min_wait_blocks,
            table,
        )
        num_cached = outcome.num_cached_blocks * BLOCK_SIZE
        match outcome.status:
            case core_acquire.GRANTED:
                self.explanations.add(acquire, outcome)
                return AcquireResult(AcquireStatus.GRANTED, table, num_cached)
            case core_acquire.WAIT:
                return AcquireResult(AcquireStatus.WAIT)
            case _:
                return AcquireResult(AcquireStatus.SHORT, num_needed=outcome.num_needed)

    def _take_woken(self, num_woken: int) -> Int64s:
        woken = np.empty(num_woken, np.int64)
        take_woken(self.tables.arrays, woken)
        return woken

    def clear(self, condition: Callable[[Namespace], bool]) -> Cleared:
        """Forgets what is cached in the namespaces that meet the condition, pins included."""
        self.pins.remove_where(condition)
        if self.last_call.answer is not None:
            # A repeat of the last call must not bring back what is forgotten.
            answer = self.last_call.answer
            advance = AdvanceResult(*answer.advance[:3])
            self.last_call = self.last_call._replace(answer=answer._replace(advance=advance))
        in_scope = np.zeros(self.tables.pool.roots.size, np.bool_)
        for namespace, row in self.tables.namespaces.rows.items():
            in_scope[row] = condition(namespace)
        return Cleared(*prefixes.purge(self.tables.arrays, in_scope))
