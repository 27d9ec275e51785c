"""Why sequences hit or missed the cache, for the last few thousand that were admitted."""

from collections import OrderedDict
from typing import NamedTuple

from memory_manager.core.acquire import AcquireOutcome
from memory_manager.core.ghosts import EvictionCause, MissReason
from memory_manager.core.layout import BLOCK_SIZE, NONE
from memory_manager.errors import NotFoundError
from memory_manager.requests import Acquire
from memory_manager.tables import Tables
from memory_manager.views import Explanation

_CAPACITY = 4096


class _Eviction(NamedTuple):
    cause: EvictionCause
    seconds_ago: float
    for_tenant: str | None


class _Entry(NamedTuple):
    tenant: str
    num_tokens: int
    outcome: AcquireOutcome
    eviction: _Eviction | None


class Explanations:
    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._entries: OrderedDict[int, _Entry] = OrderedDict()

    def add(self, acquire: Acquire, outcome: AcquireOutcome) -> None:
        """Remembers how an acquire that was granted fared; the oldest is forgotten."""
        eviction = None if outcome.ghost == NONE else self._eviction(outcome.ghost)
        self._entries[acquire.sequence_id] = _Entry(acquire.tenant, acquire.tokens.size, outcome, eviction)
        if len(self._entries) > _CAPACITY:
            self._entries.popitem(last=False)

    def explain(self, sequence_id: int, *, administrator: bool) -> Explanation:
        """Names of other tenants are for administrators. Raises NotFoundError / UNKNOWN_SEQUENCE."""
        entry = self._entries.get(sequence_id)
        if entry is None:
            raise NotFoundError("UNKNOWN_SEQUENCE", f"sequence {sequence_id} is unknown, or too long ago")
        outcome, eviction = entry.outcome, entry.eviction
        show_tenant = eviction is not None and (administrator or eviction.for_tenant == entry.tenant)
        return Explanation(
            sequence_id=sequence_id,
            num_tokens=entry.num_tokens,
            num_cached=outcome.num_cached_blocks * BLOCK_SIZE,
            missed_at_block=outcome.num_cached_blocks,
            reason=MissReason(outcome.miss_reason),
            eviction_cause=eviction.cause if eviction else None,
            evicted_seconds_ago=eviction.seconds_ago if eviction else None,
            evicted_for_tenant=eviction.for_tenant if eviction and show_tenant else None,
            num_more_blocks=outcome.num_more_blocks,
        )

    def _eviction(self, slot: int) -> _Eviction | None:
        ghost = self._tables.pool.ghosts[slot]
        if ghost["cause"] == EvictionCause.PURGED:
            return None
        age_us = int(self._tables.pool.counters["now_us"][0]) - int(ghost["left_at_us"])
        for_tenant = self._tables.tenant_of_row(int(ghost["tenant"]))
        return _Eviction(EvictionCause(ghost["cause"]), age_us / 1e6, for_tenant)
