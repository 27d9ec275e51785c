"""The model's updates: the lists of a call, checked as a whole, then executed one after the other."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.memory_manager.model import (
    BLOCK,
    Limits,
    Model,
    Namespace,
    Node,
    Pinned,
    Rejected,
    Sequence,
    Waiter,
    blocks_for,
)
from tests.memory_manager.model_texts import LONGEST


@dataclass
class AcquireCall:
    sequence_id: int
    tokens: list[int]
    tenant: str
    namespace: Namespace
    match_prefix: bool


@dataclass
class Call:
    launched: int
    completed: int
    advances: list[tuple[int, list[int], int]] = field(default_factory=list)  # id, tokens, num_written
    num_drafts: list[int] = field(default_factory=list)  # wanted by each advance; empty: none
    truncates: list[tuple[int, int]] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    forks: list[tuple[int, int]] = field(default_factory=list)
    rooms: list[tuple[int, int]] = field(default_factory=list)
    acquires: list[AcquireCall] = field(default_factory=list)

    @property
    def num_operations(self) -> int:
        return (
            len(self.advances)
            + len(self.truncates)
            + len(self.releases)
            + len(self.forks)
            + len(self.rooms)
            + len(self.acquires)
        )


@dataclass
class Answer:
    replaced: list[tuple[int, int, int]] = field(default_factory=list)
    drafts: list[tuple[int, int, list[int]]] = field(default_factory=list)  # id, base length, tokens
    forks: list[list[tuple[int, int]] | None] = field(default_factory=list)
    rooms: list[list[int]] = field(default_factory=list)
    # ("GRANTED", table, num_cached), ("WAIT",), ("SHORT", needed) or ("NEVER", needed, limit)
    acquires: list[tuple[object, ...]] = field(default_factory=list)
    wake: list[int] = field(default_factory=list)
    num_free: int = 0
    num_fenced: int = 0
    num_evictable: int = 0


class ModelPool(Model):
    def update(self, call: Call) -> Answer:
        self.check(call)
        answer = Answer()
        self.begin(call.launched, call.completed)
        for sequence_id, tokens, num_written in call.advances:
            answer.replaced += self.advance(self.sequences[sequence_id], tokens, num_written)
        for sequence_id, num_kept in call.truncates:
            sequence = self.sequences[sequence_id]
            self.counts["num_truncated_blocks"] += len(sequence.table) - num_kept
            self.drop_private(sequence, num_kept - len(sequence.path))
        for sequence_id in call.releases:
            self.release(sequence_id)
        answer.drafts = self.draft(call)
        answer.forks = [self.fork(parent, child) for parent, child in call.forks]
        answer.rooms = [self.room(sequence_id, ahead) for sequence_id, ahead in call.rooms]
        answer.acquires = [self.acquire(acquire) for acquire in call.acquires]
        answer.wake = self.take_woken()
        answer.num_free, answer.num_fenced = len(self.free), len(self.fence)
        answer.num_evictable = len(self.evictable())
        return answer

    def check(self, call: Call) -> None:
        if call.completed > call.launched or call.launched < self.launched or call.completed < self.completed:
            raise Rejected("BAD_STEPS")
        children = [child for _, child in call.forks]
        acquired = [acquire.sequence_id for acquire in call.acquires]
        if len(set(children + acquired)) < len(children + acquired):
            raise Rejected("DUPLICATE_SEQUENCE")
        lengths = {sequence.sequence_id: len(sequence.tokens) for sequence in self.sequences.values()}
        self.check_advances(call, lengths)
        self.check_truncates(call, lengths)
        for sequence_id in call.releases:
            lengths.pop(sequence_id, None)
        self.check_new_parts(call, lengths, children, acquired)

    def check_advances(self, call: Call, lengths: dict[int, int]) -> None:
        advanced = set()
        for sequence_id, tokens, num_written in call.advances:
            if sequence_id not in lengths:
                raise Rejected("UNKNOWN_SEQUENCE")
            if sequence_id in advanced:
                raise Rejected("DUPLICATE_SEQUENCE")
            sequence = self.sequences[sequence_id]
            advanced.add(sequence_id)
            lengths[sequence_id] += len(tokens)
            if lengths[sequence_id] > len(sequence.table) * BLOCK:
                raise Rejected("NO_ROOM")
            if not sequence.num_written <= num_written <= lengths[sequence_id]:
                raise Rejected("BAD_NUM_WRITTEN")

    def check_truncates(self, call: Call, lengths: dict[int, int]) -> None:
        truncated = set()
        for sequence_id, num_kept in call.truncates:
            if sequence_id not in lengths:
                raise Rejected("UNKNOWN_SEQUENCE")
            if sequence_id in truncated:
                raise Rejected("DUPLICATE_SEQUENCE")
            truncated.add(sequence_id)
            if not 0 <= num_kept <= len(self.sequences[sequence_id].table):
                raise Rejected("BAD_TRUNCATE")
            if num_kept * BLOCK < lengths[sequence_id]:
                raise Rejected("TRUNCATE_TOO_SHORT")

    def check_new_parts(
        self, call: Call, lengths: dict[int, int], children: list[int], acquired: list[int]
    ) -> None:
        if any(parent not in lengths for parent, _ in call.forks):
            raise Rejected("UNKNOWN_SEQUENCE")
        self.check_new_ids(children, lengths)
        roomed = set()
        for sequence_id, ahead in call.rooms:
            if sequence_id not in lengths and sequence_id not in children:
                raise Rejected("UNKNOWN_SEQUENCE")
            if sequence_id in lengths and sequence_id in roomed:
                raise Rejected("DUPLICATE_SEQUENCE")
            roomed.add(sequence_id)
            if ahead < 0:
                raise Rejected("BAD_NUM_TOKENS")
        self.check_new_ids(acquired, lengths)

    def check_new_ids(self, sequence_ids: list[int], lengths: dict[int, int]) -> None:
        for sequence_id in sequence_ids:
            if sequence_id < 1:
                raise Rejected("BAD_SEQUENCE_ID")
            if sequence_id in lengths:
                raise Rejected("SEQUENCE_EXISTS")

    def advance(self, sequence: Sequence, tokens: list[int], num_written: int) -> list[tuple[int, int, int]]:
        replaced = []
        sequence.tokens += tokens
        sequence.num_written = num_written
        while sequence.seals and (len(sequence.path) + 1) * BLOCK <= num_written:
            winner = self.seal(sequence)
            if winner is not None:
                replaced.append((sequence.sequence_id, len(sequence.path) - 1, winner.block))
        return replaced

    def release(self, sequence_id: int) -> None:
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            self.waiters = [waiter for waiter in self.waiters if waiter.sequence_id != sequence_id]
            return
        if sequence.seals:
            start = max(0, sequence.num_inherited - LONGEST)
            self.texts.remember(sequence.namespace, sequence.tokens[start:])
        self.retract(sequence, len(sequence.path) + 1)
        self.drop_private(sequence, 0)
        del self.sequences[sequence_id]
        if sequence.path:
            self.drop_hold(sequence.path[-1])

    def draft(self, call: Call) -> list[tuple[int, int, list[int]]]:
        """Grouped by namespace, these as they come first."""
        wanted = dict(zip([i for i, _, _ in call.advances], call.num_drafts, strict=False))
        asking = [self.sequences[i] for i, num in wanted.items() if num > 0 and i in self.sequences]
        namespaces = list(dict.fromkeys(sequence.namespace for sequence in asking))
        asking.sort(key=lambda sequence: namespaces.index(sequence.namespace))
        drafts = [
            (s.sequence_id, len(s.tokens), self.texts.draft(s.namespace, s.tokens, wanted[s.sequence_id]))
            for s in asking
        ]
        return [draft for draft in drafts if draft[2]]

    def fork(self, parent_id: int, child_id: int) -> list[tuple[int, int]] | None:
        parent = self.sequences[parent_id]
        num_fresh = blocks_for(len(parent.tokens)) - len(parent.path)
        if self.reserve(parent.tenant, num_fresh, partial=False) < num_fresh:
            return None
        child = Sequence(
            child_id,
            parent.tenant,
            parent.namespace,
            list(parent.tokens),
            parent.num_written,
            list(parent.path),
            [],
            parent.seals,
            len(parent.tokens),
        )
        self.sequences[child_id] = child
        if child.path:
            child.path[-1].num_holds += 1
        self.counts["num_forks"] += 1
        return list(zip(parent.private, self.take(child, num_fresh), strict=False))

    def room(self, sequence_id: int, ahead: int) -> list[int]:
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return []
        missing = blocks_for(len(sequence.tokens) + ahead) - len(sequence.table)
        if missing <= 0:
            return []
        return self.take(sequence, self.reserve(sequence.tenant, missing, partial=True))

    def acquire(self, call: AcquireCall) -> tuple[object, ...]:
        num_needed = blocks_for(len(call.tokens))
        num_limit = min(self.num_blocks, self.limits(call.tenant).quota)
        if num_needed > num_limit:
            return ("NEVER", num_needed, num_limit)
        limit = (len(call.tokens) - 1) // BLOCK if call.match_prefix else 0
        path, num_pending = self.match(call.namespace, call.tokens, limit)
        self.waiters = [waiter for waiter in self.waiters if waiter.sequence_id != call.sequence_id]
        if num_pending >= self.min_wait_blocks:
            key = (call.namespace, tuple(call.tokens[: (len(path) + num_pending) * BLOCK]))
            self.waiters.append(Waiter(call.sequence_id, key, num_pending))
            return ("WAIT",)
        num_fresh = num_needed - len(path)
        num_evictable = len(self.evictable())
        if path:
            path[-1].num_holds += 1
        if self.reserve(call.tenant, num_fresh, partial=False) < num_fresh:
            num_short = num_fresh + num_evictable - len(self.evictable())
            if path:
                path[-1].num_holds -= 1
            return ("SHORT", num_short)
        return self.admit(call, path, num_fresh)

    def admit(self, call: AcquireCall, path: list[Node], num_fresh: int) -> tuple[object, ...]:
        num_cached = len(path) * BLOCK
        sequence = Sequence(
            call.sequence_id, call.tenant, call.namespace, list(call.tokens), num_cached, path, []
        )
        sequence.num_inherited = num_cached
        self.take(sequence, num_fresh)
        self.sequences[call.sequence_id] = sequence
        for num_blocks in range(len(path) + 1, len(call.tokens) // BLOCK + 1):
            key = sequence.key(num_blocks)
            if key in self.ready or key in self.pending:
                break
            self.pending[key] = sequence
        self.counts["num_query_tokens"] += len(call.tokens)
        self.counts["num_hit_tokens"] += num_cached
        return ("GRANTED", sequence.table, num_cached)

    def pin(self, pin_id: int, tenant: str, namespace: Namespace, tokens: list[int]) -> int:
        path, _ = self.match(namespace, tokens, len(tokens) // BLOCK)
        if not path:
            raise Rejected("NOT_CACHED")
        pinned = sum(pin.node.depth for pin in self.pins.values() if pin.tenant == tenant)
        if pinned + len(path) > self.limits(tenant).pin_cap:
            raise Rejected("PIN_CAP")
        path[-1].num_holds += 1
        self.pins[pin_id] = Pinned(tenant, path[-1])
        return len(path) * BLOCK

    def unpin(self, pin_id: int) -> None:
        pinned = self.pins.pop(pin_id, None)
        if pinned is not None:
            self.drop_hold(pinned.node)

    def clear(self, in_scope: Callable[[Namespace], bool]) -> tuple[int, int]:
        self.texts.forget(in_scope)
        for pin_id, pinned in list(self.pins.items()):
            if in_scope(pinned.node.key[0]):
                self.unpin(pin_id)
        for sequence in self.sequences.values():
            if in_scope(sequence.namespace):
                self.retract(sequence, len(sequence.path) + 1)
                sequence.seals = False
        forgotten = [node for node in self.ready.values() if in_scope(node.key[0])]
        used = {node for node in forgotten if node.is_used}
        for node in sorted(forgotten, key=lambda node: node.block):
            del self.ready[node.key]
            node.is_attached = False
            if node not in used:
                self.put_back(node.block, self.launched)
                if node.parent is not None:
                    node.parent.children.remove(node)
        return len(forgotten) - len(used), len(used)


__all__ = ["AcquireCall", "Answer", "Call", "Limits", "ModelPool", "Rejected"]
