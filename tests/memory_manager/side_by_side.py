"""Drives a memory manager and the plain model with the same calls and compares every answer."""

import random
from typing import Any, Literal

import numpy as np
import pytest

from memory_manager import (
    Acquire,
    Advance,
    Fork,
    MemoryConfig,
    MemoryManager,
    MemoryManagerError,
    Release,
    Room,
    TenantLimits,
    Truncate,
    UpdateAnswer,
    UpdateRequest,
)
from tests.memory_manager.model import Limits, Namespace, Rejected
from tests.memory_manager.model_texts import Texts
from tests.memory_manager.model_updates import Answer, Call, ModelPool

FINGERPRINT = "model"
# Small, so that namespaces displace each other and rings come around.
DRAFT_INDEX_TOKENS = 1024
STATES = {"FREE": 0, "PRIVATE": 1, "READY": 2, "FENCED": 3}

COUNTED = (
    "num_evictions num_query_tokens num_hit_tokens num_forks num_coalesced_tokens num_truncated_blocks"
    " num_replaced_blocks"
).split()


def int32s(values: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


def int64s(values: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, np.int64)


def to_request(call: Call, epoch: int, op_seq: int) -> UpdateRequest:
    return UpdateRequest(
        epoch=epoch,
        op_seq=op_seq,
        launched_step=call.launched,
        completed_step=call.completed,
        advance=Advance(
            int64s([sequence_id for sequence_id, _, _ in call.advances]),
            int32s([len(tokens) for _, tokens, _ in call.advances]),
            int32s([token for _, tokens, _ in call.advances for token in tokens]),
            int32s([num_written for _, _, num_written in call.advances]),
            int32s(call.num_drafts),
        ),
        truncate=Truncate(int64s([t[0] for t in call.truncates]), int32s([t[1] for t in call.truncates])),
        release=Release(int64s(call.releases)),
        fork=Fork(int64s([f[0] for f in call.forks]), int64s([f[1] for f in call.forks])),
        room=Room(int64s([r[0] for r in call.rooms]), int32s([r[1] for r in call.rooms])),
        acquires=tuple(
            Acquire(a.sequence_id, int32s(a.tokens), a.tenant, *a.namespace, match_prefix=a.match_prefix)
            for a in call.acquires
        ),
    )


def to_answer(answer: UpdateAnswer) -> Answer:
    advance, fork, room = answer.advance, answer.fork, answer.room
    replaced = zip(
        advance.replaced_sequence_ids.tolist(),
        advance.replaced_indices.tolist(),
        advance.replaced_blocks.tolist(),
        strict=True,
    )
    draft_ends = np.cumsum(advance.num_draft_tokens)
    drafts = zip(
        advance.draft_sequence_ids.tolist(),
        advance.draft_base_lengths.tolist(),
        [part.tolist() for part in np.split(advance.draft_tokens, draft_ends)[:-1]],
        strict=True,
    )
    copies = list(zip(fork.copy_src.tolist(), fork.copy_dst.tolist(), strict=True))
    copy_ends, room_ends = np.cumsum(fork.num_copies).tolist(), np.cumsum(room.num_blocks).tolist()
    return Answer(
        replaced=list(replaced),
        drafts=list(drafts),
        forks=[
            copies[end - num : end] if granted else None
            for granted, num, end in zip(fork.granted, fork.num_copies, copy_ends, strict=True)
        ],
        rooms=[
            room.blocks[end - num : end].tolist()
            for num, end in zip(room.num_blocks.tolist(), room_ends, strict=True)
        ],
        acquires=[
            {
                "GRANTED": ("GRANTED", a.block_table.tolist(), a.num_cached),
                "WAIT": ("WAIT",),
                "SHORT": ("SHORT", a.num_needed),
                "NEVER": ("NEVER", a.num_needed, a.num_limit),
            }[a.status.name]
            for a in answer.acquires
        ],
        wake=answer.wake.tolist(),
        num_free=answer.num_free,
        num_fenced=answer.num_fenced,
        num_evictable=answer.num_evictable,
    )


class SideBySide:
    """One engine of a manager and its model. Every method raises AssertionError on a difference."""

    def __init__(
        self,
        num_blocks: int,
        tenants: dict[str, TenantLimits],
        min_wait_blocks: int = 2,
        manager: MemoryManager | None = None,
        engine_id: str = "engine",
        eviction: Literal["lru", "fifo"] = "lru",
        texts: Texts | None = None,
    ) -> None:
        """`texts` are shared by the engines of a manager."""
        self.now = 0.0
        self.engine_id = engine_id
        self.manager = manager or MemoryManager(
            MemoryConfig(
                tenants=tenants,
                min_wait_blocks=min_wait_blocks,
                lease_ms=10**9,
                eviction=eviction,
                draft_index_tokens=DRAFT_INDEX_TOKENS,
            ),
            lambda: self.now,
        )
        registration = self.manager.register_engine(engine_id, num_blocks, 16, FINGERPRINT)
        self.epoch = registration.epoch
        self.op_seq = 0
        self.tenants = tenants
        self.model = ModelPool(
            num_blocks,
            min_wait_blocks,
            self._limits,
            texts or Texts(DRAFT_INDEX_TOKENS),
            fifo=eviction == "fifo",
        )

    def _limits(self, tenant: str) -> Limits:
        limits = self.tenants.get(tenant, TenantLimits())
        size = self.model.num_blocks
        return Limits(
            quota=10**9 if limits.quota is None else limits.quota,
            floor=limits.floor,
            pin_cap=size // 4 if limits.pin_cap is None else limits.pin_cap,
        )

    def update(self, call: Call) -> Answer | None:
        """None when both refuse the call."""
        request = to_request(call, self.epoch, self.op_seq + 1)
        try:
            expected = self.model.update(call)
        except Rejected as rejected:
            reason = rejected.reason
            with pytest.raises(MemoryManagerError) as refused:
                self.manager.update_sequences(request)
            assert refused.value.reason == reason
            return None
        answer = self.manager.update_sequences(request)
        self.op_seq += 1
        assert to_answer(answer) == expected
        assert self.manager.update_sequences(to_request(call, self.epoch, self.op_seq)) is answer
        return expected

    def pin(self, tenant: str, namespace: Namespace, tokens: list[int], ttl_ms: int) -> int | None:
        """The pin, or None when both refuse it."""
        try:
            pin = self.manager.pin_prefix(self.engine_id, tenant, *namespace, int32s(tokens), ttl_ms)
        except MemoryManagerError as refused:
            with pytest.raises(Rejected, match=refused.reason):
                self.model.pin(0, tenant, namespace, tokens)
            return None
        assert pin.num_tokens == self.model.pin(pin.pin_id, tenant, namespace, tokens)
        return pin.pin_id

    def unpin(self, pin_id: int) -> None:
        self.manager.unpin_prefix(pin_id)
        self.model.unpin(pin_id)

    def clear(self, salt: str | None) -> None:
        cleared = self.manager.clear_cache(self.engine_id, salt)
        expected = self.model.clear(lambda namespace: salt in (None, namespace[0]))
        assert (cleared.num_freed, cleared.num_detached) == expected

    def compare(self) -> None:
        """The whole state, as far as it can be seen from outside, and every invariant inside."""
        assert self.manager.check_integrity() == []
        self._compare_blocks()
        self._compare_stats()

    def _compare_blocks(self) -> None:
        model, snapshot = self.model, self.manager.inspect_blocks(self.engine_id)
        size = model.num_blocks
        states, users, depths, parents = [0] * size, [0] * size, [0] * size, [-1] * size
        owners: list[str | None] = [None] * size
        for block, _ in model.fence:
            states[block] = STATES["FENCED"]
        for node in model.nodes():
            states[node.block], depths[node.block], owners[node.block] = (
                STATES["READY"],
                node.depth,
                node.owner,
            )
            parents[node.block] = node.parent.block if node.parent else -1
        for sequence in model.sequences.values():
            for block in sequence.private:
                states[block], owners[block] = STATES["PRIVATE"], sequence.tenant
            for block in sequence.table:
                users[block] += 1
        assert snapshot.states.tolist() == states
        assert snapshot.num_users.tolist() == users
        assert snapshot.depths.tolist() == depths
        assert snapshot.parents.tolist() == parents
        assert [None if i < 0 else snapshot.tenants[i] for i in snapshot.owners] == owners

    def _compare_stats(self) -> None:
        model = self.model
        (stats,) = [e for e in self.manager.stats().engines if e.engine_id == self.engine_id]
        assert stats.num_free == len(model.free)
        assert stats.num_fenced == len(model.fence)
        assert stats.num_evictable == len(model.evictable())
        assert stats.num_sequences == len(model.sequences)
        assert stats.num_waiting == len(model.waiters)
        for name in COUNTED:
            assert getattr(stats, name) == model.counts[name], name
        for tenant in stats.tenants:
            assert tenant.num_blocks == model.charged(tenant.tenant)
            pinned = [pin.node.depth for pin in model.pins.values() if pin.tenant == tenant.tenant]
            assert tenant.num_pinned == sum(pinned)


def random_tokens(rng: random.Random, num_tokens: int) -> list[int]:
    """Made of few different blocks, so that prompts and outputs meet in the trie."""
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens += [rng.choice((1, 1, 1, 2, 3))] * 16
    return tokens[:num_tokens]
