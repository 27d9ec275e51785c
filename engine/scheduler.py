"""Continuous batching with chunked prefill over blocks that the memory manager grants."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from engine.admission import candidates, victims
from engine.batch import Batch, ScheduledSequence, build_batch
from engine.errors import MemoryManagerError, QueueFullError, StaleEpochError, TooLargeError
from engine.kv_pool import BLOCK_SIZE
from engine.ledger import Ledger, Outcome
from engine.metrics import EngineMetrics
from engine.outputs import SequenceOutput
from engine.runner import StepResult
from engine.sampler import Sampled
from engine.selection import can_run, select
from engine.sequence import FinishReason, Request, Sequence, Status
from engine.speculation.drafter import DraftTree
from engine.speculation.planner import SpeculationPlanner
from engine.step_budget import StepBudget
from engine.stopping import append_tokens
from engine.waiting import WaitingQueue

logger = logging.getLogger(__name__)

# How long a step with nothing to compute waits for the memory manager before it looks at new requests.
IDLE_WAIT_S = 0.05


@dataclass(frozen=True)
class SchedulerLimits:
    num_blocks: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_waiting: int = 2048
    max_model_len: int = 8192


class Scheduler:
    """Owns every sequence. One thread calls it."""

    def __init__(
        self,
        ledger: Ledger,
        limits: SchedulerLimits,
        model_fingerprint: str,
        metrics: EngineMetrics,
        planner: SpeculationPlanner | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ledger = ledger
        self._limits = limits
        self._model_fingerprint = model_fingerprint
        self._metrics = metrics
        self._planner = planner
        self._clock = clock
        self._budget = StepBudget(limits.max_num_batched_tokens)
        # Each running sequence has its token in every step.
        self._max_running = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._registered = False
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []
        self._requests: dict[str, list[Sequence]] = {}
        self._ended: list[SequenceOutput] = []  # terminal outputs not made by a step's tokens
        self._num_added = 0
        self._num_steps = 0
        self._last_step_at = time.perf_counter()
        self._denied: list[Sequence] = []  # got no room in the last answer
        self._short_of = 0  # blocks the first waiting sequence needs and could not have

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._ended or self._ledger.has_news or not self._registered)

    # ---- requests come and go

    def add(self, request: Request) -> None:
        """Queues a request. Raises QueueFullError or TooLargeError."""
        if len(self._waiting) >= self._limits.max_waiting:
            raise QueueFullError(f"{len(self._waiting)} requests are waiting, as many as are allowed")
        num_tokens, room = len(request.prompt) + len(request.output), self._limits.num_blocks * BLOCK_SIZE
        if num_tokens + 1 > min(room, self._limits.max_model_len):
            raise TooLargeError(
                f"{num_tokens} tokens do not fit: the pool holds {room}, "
                f"the model's context {self._limits.max_model_len}"
            )
        siblings = tuple(self._new_sequence(request, i) for i in range(1, request.num_choices))
        first = self._new_sequence(request, 0, siblings)
        self._requests[request.request_id] = [first, *siblings]
        self._waiting.add(first)

    def abort(self, request_id: str, asked_at: float | None = None, index: int | None = None) -> None:
        """Ends every choice that has not ended, or the one with that index; unknown ids are ignored.

        `asked_at` (time.monotonic) is when the client left, for the histogram of how long its blocks stay.
        """
        group = self._requests.get(request_id, [])
        sequences = [s for s in group if s.status is not Status.FINISHED and index in (None, s.index)]
        if any(sequence.sequence_id for sequence in sequences):
            self._ledger.note_abort(time.monotonic() if asked_at is None else asked_at)
        for sequence in sequences:
            if index is not None:
                self._leave_group(sequence, group)
            self._end(sequence, FinishReason.ABORT)

    def _leave_group(self, sequence: Sequence, group: list[Sequence]) -> None:
        """The choices that are not forked yet get on without this one."""
        if sequence.siblings:
            heir, *others = sequence.siblings
            heir.siblings, sequence.siblings = tuple(others), ()
            self._waiting.add(heir)
        for other in group:
            other.siblings = tuple(s for s in other.siblings if s is not sequence)

    def _new_sequence(self, request: Request, index: int, siblings: tuple[Sequence, ...] = ()) -> Sequence:
        self._num_added += 1
        return Sequence(request, index, self._num_added, siblings, self._limits.max_model_len)

    # ---- schedule

    def schedule(self) -> Batch | None:
        """Talks to the memory manager and picks what the next step computes; None when there is nothing."""
        try:
            self._exchange()
        except MemoryManagerError as error:
            logger.warning("%s; registering again, %d sequences start over", error, len(self._running))
            self._lose_all_blocks()
        scheduled = select(self._running, self._budget, self._planner)
        if not scheduled:
            return None
        self._num_steps += 1
        now = self._clock()
        for item in scheduled:
            if item.sequence.first_scheduled is None:
                item.sequence.first_scheduled = now
        return build_batch(tuple(scheduled))

    def _exchange(self) -> None:
        """One update with the memory manager, overlapped with the step where nothing waits for it."""
        if not self._registered:
            self._registered = self._ledger.register(
                self._limits.num_blocks, self._model_fingerprint, IDLE_WAIT_S
            )
            if not self._registered:
                return
        if self._ledger.epoch_ended:
            raise StaleEpochError("the memory manager has ended the epoch")
        if self._ledger.is_outstanding:
            self._settle(0.0 if any(map(can_run, self._running)) else IDLE_WAIT_S)
        if self._ledger.is_outstanding:
            return
        for victim in victims(self._running, self._ledger, self._denied):
            self._preempt(victim)
        asking = candidates(self._waiting, self._running, self._ledger, self._max_running, self._short_of)
        should_wait = self._ledger.send(self._running, asking, self._num_steps)
        if should_wait or not self._running:
            self._settle(IDLE_WAIT_S)

    def _settle(self, timeout_s: float) -> None:
        outcome = self._ledger.receive(timeout_s)
        if outcome is not None:
            self._apply(outcome)

    def _apply(self, outcome: Outcome) -> None:
        self._denied = outcome.denied
        for sequence in outcome.admitted:
            self._waiting.discard(sequence)
            self._metrics.observe_admission(sequence)
            self._run(sequence)
        for sequence in outcome.forked:
            self._run(sequence)
        for sequence in outcome.fork_refused:
            self._waiting.add(sequence)
        for sequence in outcome.parked:
            self._waiting.park(sequence)
        self._waiting.wake(outcome.woken)
        for seconds in outcome.abort_seconds:
            self._metrics.abort_seconds.observe(seconds)
        for sequence, needed, limit in outcome.never:
            self._end(sequence, FinishReason.ABORT, f"needs {needed} blocks, may have {limit}")
        self._short_of = outcome.short[0][1] if outcome.short else 0

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        self._running.append(sequence)
        self._running.sort(key=lambda s: s.urgency)

    def _preempt(self, victim: Sequence) -> None:
        self._running.remove(victim)
        self._metrics.num_preemptions += 1
        victim.num_preemptions += 1
        self._send_back(victim)

    def _release(self, sequence: Sequence) -> None:
        """Children that were to be forked from it start from its cached prompt."""
        for child in self._ledger.release(sequence):
            self._waiting.add(child)

    def _send_back(self, sequence: Sequence) -> None:
        self._release(sequence)
        sequence.status = Status.WAITING
        self._waiting.add(sequence)

    def _lose_all_blocks(self) -> None:
        """The epoch is over: every running sequence has tokens but no blocks."""
        self._registered = False
        self._waiting.wake_all()
        for sequence in self._running:
            sequence.status = Status.WAITING
            sequence.drop_blocks()
            self._waiting.add(sequence)
        self._running.clear()
        for child in self._ledger.forget():
            child.drop_blocks()
            self._waiting.add(child)
        for sequence in (s for group in self._requests.values() for s in group):
            sequence.sequence_id = 0

    # ---- postprocess

    def postprocess(self, batch: Batch | None, result: StepResult | None) -> list[SequenceOutput]:
        """Applies a step's tokens; answers what there is to send, terminal outputs included."""
        outputs, self._ended = self._ended, []
        if batch is None or result is None:
            return outputs
        self._note_time(result.seconds)
        self._budget.observe(batch.num_tokens, result.seconds)
        self._metrics.observe_step(batch, result.seconds)
        for item, sampled in zip(batch.scheduled, result.sampled, strict=True):
            item.sequence.num_computed += item.num_tokens
            self._waiting.charge(item.sequence.request.tenant, item.num_tokens)
            if item.draft is not None and sampled is not None:
                self._settle_draft(item.sequence, item.draft, sampled[0].tokens)
            if sampled is not None:
                outputs.extend(self._extend(item, sampled))
        return outputs

    def _note_time(self, seconds: float) -> None:
        now = time.perf_counter()
        if self._planner is not None:
            # Longer than a step, it was no work.
            self._planner.note_between(min(now - seconds - self._last_step_at, seconds))
        self._last_step_at = now

    def _settle_draft(self, sequence: Sequence, draft: DraftTree, tokens: list[int]) -> None:
        """Accepted tokens have their K/V; rejected ones are forgotten by not counting them."""
        sequence.num_computed += len(tokens) - 1
        if self._planner is not None:
            self._planner.acceptance.learn(sequence, draft, tokens)

    def _extend(self, item: ScheduledSequence, sampled: list[Sampled]) -> list[SequenceOutput]:
        """Appends what was sampled for a sequence and, at the end of their prompt, its siblings."""
        sequence = item.sequence
        group = (sequence, *sequence.siblings)
        sequence.siblings = ()
        outputs = [append_tokens(choice, one, item.draft) for choice, one in zip(group, sampled, strict=True)]
        for choice, output in zip(group, outputs, strict=True):
            self._metrics.observe_output(output)
            if output.finish_reason is not None:
                self._finish(choice)
        alive = [choice for choice in group if choice.status is not Status.FINISHED]
        if sequence.status is Status.FINISHED:
            self._running.remove(sequence)
            if not alive:
                self._release(sequence)
            else:
                self._ledger.inherit(alive[0], sequence)
                self._run(alive[0])
        for child in alive[1:]:
            self._ledger.fork(alive[0], child)
        return outputs

    def _end(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        """Ends a sequence between steps."""
        self._waiting.discard(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        self._release(sequence)
        self._finish(sequence)
        self._ended.append(
            SequenceOutput(sequence.request.request_id, sequence.index, [], reason, error=error)
        )

    def _finish(self, sequence: Sequence) -> None:
        sequence.status = Status.FINISHED
        group = self._requests[sequence.request.request_id]
        if all(choice.status is Status.FINISHED for choice in group):
            del self._requests[sequence.request.request_id]
