"""The engine's side of the conversation with the memory manager.

Collects what there is to say about sequences, sends it as one update, and applies the answer to them.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.kv_pool import BLOCK_SIZE
from engine.memory_client import (
    Acquire,
    AcquireStatus,
    Advance,
    Fork,
    MemoryClient,
    Room,
    Truncate,
    Update,
    UpdateAnswer,
)
from engine.sequence import OfferedDraft, Sequence

# Room asked for beyond the next token: the update is answered while the step after the next runs.
LOOKAHEAD_TOKENS = 1
# New tokens after which a draft is asked for again.
DRAFT_INTERVAL = 4


@dataclass
class Outcome:
    """What an answer changed, beyond the tables of running sequences."""

    admitted: list[Sequence] = field(default_factory=list)
    forked: list[Sequence] = field(default_factory=list)
    fork_refused: list[Sequence] = field(default_factory=list)
    denied: list[Sequence] = field(default_factory=list)  # got no room, whatever the pool has
    short: list[tuple[Sequence, int]] = field(default_factory=list)  # with the blocks it needs
    never: list[tuple[Sequence, int, int]] = field(default_factory=list)  # needs, could have
    parked: list[Sequence] = field(default_factory=list)  # wait for a prefix that is being computed
    woken: set[int] = field(default_factory=set)  # sequence ids
    abort_seconds: list[float] = field(default_factory=list)  # from each abort until its blocks were back


@dataclass
class _Sent:
    """What is behind the entries of the outstanding update."""

    rooms: list[int]  # ids: another choice may have inherited what is granted
    forks: list[tuple[int, Sequence]]  # the parent's id, the child with the parent's blocks
    acquires: list[Sequence]
    aborts: list[float]


class Ledger:
    def __init__(
        self,
        memory: MemoryClient,
        copy_blocks: Callable[[list[int], list[int]], None],
        num_drafts: int = 0,
    ) -> None:
        """`num_drafts`: draft tokens asked for a sequence; 0 without speculation."""
        self._memory = memory
        self._num_drafts = num_drafts
        self._copy_blocks = copy_blocks
        self._pending = Update()
        self._forks: list[tuple[Sequence, Sequence]] = []
        self._aborts: list[float] = []  # when they were asked for, time.monotonic
        self._sent: _Sent | None = None
        self._by_id: dict[int, Sequence] = {}
        self._last_sequence_id = 0
        self.num_free = 0
        self.num_fenced = 0
        self.num_evictable = 0

    @property
    def is_outstanding(self) -> bool:
        return self._sent is not None

    @property
    def epoch_ended(self) -> bool:
        return self._memory.epoch_ended

    @property
    def num_forking(self) -> int:
        """Children that were asked for, or are about to be."""
        return len(self._forks) + (len(self._sent.forks) if self._sent is not None else 0)

    @property
    def has_news(self) -> bool:
        """Whether something is left to say although no sequence runs."""
        return not self._pending.is_empty or self.is_outstanding or self.num_fenced > 0

    @property
    def num_available(self) -> int:
        """Blocks that can be had now or after the running step."""
        return self.num_free + self.num_fenced + self.num_evictable

    def register(self, num_blocks: int, model_fingerprint: str, timeout_s: float) -> bool:
        """Opens an epoch, in which no sequence is known; False when nobody answered in time."""
        if not self._memory.register(num_blocks, model_fingerprint, timeout_s):
            return False
        self.num_free, self.num_fenced, self.num_evictable = num_blocks, 0, 0
        return True

    def forget(self) -> list[Sequence]:
        """The epoch has ended: nothing said or asked for counts. Answers the children of lost forks."""
        children = [child for _, child in self._forks]
        if self._sent is not None:
            children += [child for _, child in self._sent.forks]
        self._pending, self._forks, self._sent = Update(), [], None
        self._by_id.clear()
        self.num_free = self.num_fenced = self.num_evictable = 0
        return [child for child in children if child.sequence_id]

    def release(self, sequence: Sequence) -> list[Sequence]:
        """Ends a sequence's stay in the pool; its last tokens are reported by the same call.

        Answers the children that it was to have and that nobody has asked for yet.
        """
        if sequence.sequence_id == 0:
            return []
        orphans = [child for parent, child in self._forks if parent is sequence]
        self._forks = [pair for pair in self._forks if sequence not in pair]
        for child in orphans:
            child.sequence_id = 0
        self._report(sequence)
        self._pending.releases.append(sequence.sequence_id)
        self._by_id.pop(sequence.sequence_id, None)
        sequence.drop_blocks()
        sequence.sequence_id = 0
        return orphans

    def note_abort(self, asked_at: float) -> None:
        """The releases that follow are an abort's; the answer to them tells how long it took."""
        self._aborts.append(asked_at)

    def inherit(self, heir: Sequence, ended: Sequence) -> None:
        """The heir takes over an ended sequence's stay: both begin with the same prompt."""
        heir.take_blocks_of(ended)
        self._by_id[heir.sequence_id] = heir

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Asks for a child that continues the parent's prompt."""
        child.sequence_id = self._new_id()
        self._forks.append((parent, child))

    def send(self, running: Iterable[Sequence], candidates: list[Sequence], step: int) -> bool:
        """Sends everything there is to say; answers whether the next step should wait for the answer.

        `step` is the number of the last step, which has completed.
        """
        update, forks = self._pending, self._forks
        self._pending, self._forks = Update(), []
        parents = {id(parent) for parent, _ in forks}
        rooms: list[int] = []
        should_wait = bool(candidates or forks)
        for sequence in running:
            is_parent = id(sequence) in parents
            wanted = sequence.num_tokens + LOOKAHEAD_TOKENS + sequence.draft_room
            wanted = min(wanted, max(sequence.num_tokens, sequence.max_tokens))
            kept = -(-wanted // BLOCK_SIZE)
            if is_parent or sequence.capacity < wanted or self._is_due(sequence):
                self._report(sequence, update, hold_output=is_parent)
            if sequence.capacity < wanted:
                update.rooms.append(Room(sequence.sequence_id, wanted - sequence.num_reported))
                rooms.append(sequence.sequence_id)
                should_wait |= sequence.capacity < sequence.num_tokens
            elif kept < len(sequence.block_table):
                # Room for drafts that is no longer wanted.
                update.truncates.append(Truncate(sequence.sequence_id, kept))
                del sequence.block_table[kept:]
        for parent, child in forks:
            update.forks.append(Fork(parent.sequence_id, child.sequence_id))
            child.block_table = parent.block_table[: -(-child.num_prompt // BLOCK_SIZE)]
        for sequence in candidates:
            update.acquires.append(self._acquire(sequence))
        if update.is_empty and self.num_fenced == 0:
            return False
        update.launched_step = update.completed_step = step
        self._memory.send(update)
        asked = [(parent.sequence_id, child) for parent, child in forks]
        self._sent = _Sent(rooms, asked, candidates, self._aborts)
        self._aborts = []
        return should_wait

    def receive(self, timeout_s: float) -> Outcome | None:
        """Applies the outstanding answer; None when it has not come. Raises StaleEpochError."""
        sent = self._sent
        if sent is None or (answer := self._memory.receive(timeout_s)) is None:
            return None
        self._sent = None
        return self._apply(sent, answer)

    def _apply(self, sent: _Sent, answer: UpdateAnswer) -> Outcome:
        now = time.monotonic()
        outcome = Outcome(woken=set(answer.wake), abort_seconds=[now - since for since in sent.aborts])
        for replacement in answer.replacements:
            if (sequence := self._by_id.get(replacement.sequence_id)) is not None:
                sequence.block_table[replacement.logical_index] = replacement.block
            for parent_id, child in sent.forks:
                if parent_id == replacement.sequence_id and replacement.logical_index < len(
                    child.block_table
                ):
                    child.block_table[replacement.logical_index] = replacement.block
        for offer in answer.drafts:
            if (sequence := self._by_id.get(offer.sequence_id)) is not None:
                sequence.offered_draft = OfferedDraft(offer.base_length, offer.tokens)
        for sequence_id, blocks in zip(sent.rooms, answer.rooms, strict=True):
            if (sequence := self._by_id.get(sequence_id)) is not None:
                sequence.block_table.extend(blocks)
                if not blocks and sequence.capacity < sequence.num_tokens:
                    outcome.denied.append(sequence)
        self._apply_forks(sent, answer, outcome)
        self._apply_acquires(sent, answer, outcome)
        self.num_free, self.num_fenced = answer.num_free, answer.num_fenced
        self.num_evictable = answer.num_evictable
        return outcome

    def _apply_forks(self, sent: _Sent, answer: UpdateAnswer, outcome: Outcome) -> None:
        for (_, child), result in zip(sent.forks, answer.forks, strict=True):
            if not child.sequence_id:
                continue  # aborted meanwhile; its release is pending
            if not result.granted:
                child.sequence_id = 0
                child.drop_blocks()
                outcome.fork_refused.append(child)
                continue
            replaced = dict(result.copies)
            child.block_table = [replaced.get(block, block) for block in child.block_table]
            child.num_computed = child.num_reported = child.num_written_reported = child.num_prompt
            self._copy_blocks(list(replaced), list(replaced.values()))
            self._by_id[child.sequence_id] = child
            outcome.forked.append(child)

    def _apply_acquires(self, sent: _Sent, answer: UpdateAnswer, outcome: Outcome) -> None:
        for sequence, result in zip(sent.acquires, answer.acquires, strict=True):
            if not sequence.sequence_id:
                continue  # aborted meanwhile; its release is pending
            match result.status:
                case AcquireStatus.GRANTED:
                    sequence.block_table = result.block_table
                    sequence.num_computed = sequence.num_written_reported = result.num_cached
                    sequence.num_reported = sequence.num_tokens
                    if sequence.num_cached is None:
                        sequence.num_cached = result.num_cached
                    self._by_id[sequence.sequence_id] = sequence
                    outcome.admitted.append(sequence)
                case AcquireStatus.WAIT:
                    outcome.parked.append(sequence)
                case AcquireStatus.SHORT:
                    outcome.short.append((sequence, result.num_needed))
                case AcquireStatus.NEVER:
                    sequence.sequence_id = 0
                    outcome.never.append((sequence, result.num_needed, result.num_limit))

    def _is_due(self, sequence: Sequence) -> bool:
        """Whether the memory manager can do something with what is new: seal a block, or propose a draft."""
        if sequence.num_computed // BLOCK_SIZE > sequence.num_written_reported // BLOCK_SIZE:
            return True
        if not self._num_drafts or not sequence.wants_drafts or sequence.offered_draft is not None:
            return False
        return sequence.num_output == 1 or sequence.num_tokens - sequence.num_reported >= DRAFT_INTERVAL

    def _report(self, sequence: Sequence, update: Update | None = None, *, hold_output: bool = False) -> None:
        """Adds what is new about a running sequence: final tokens and how many are written."""
        if sequence.sequence_id not in self._by_id:
            return
        # A token whose block has not been granted yet is reported with the next call.
        final = sequence.num_prompt if hold_output else min(sequence.num_tokens, sequence.capacity)
        tokens = sequence.tokens[sequence.num_reported : final]
        written = min(sequence.num_computed, final)
        if not tokens and written == sequence.num_written_reported:
            return
        wanted = self._num_drafts if sequence.wants_drafts else 0
        (update or self._pending).advances.append(Advance(sequence.sequence_id, tokens, written, wanted))
        sequence.num_reported, sequence.num_written_reported = final, written

    def _acquire(self, sequence: Sequence) -> Acquire:
        if not sequence.sequence_id:
            sequence.sequence_id = self._new_id()
        request = sequence.request
        return Acquire(
            sequence.sequence_id, request.tenant, request.salt, request.adapter, request.priority,
            list(sequence.tokens), match_prefix=not sequence.wants_prompt_logprobs,
        )  # fmt: skip

    def _new_id(self) -> int:
        self._last_sequence_id += 1
        return self._last_sequence_id
