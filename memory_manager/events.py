"""Cache events: what was stored and removed, numbered, for whoever mirrors the cache elsewhere."""

import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from memory_manager.core.changes import REMOVED, STORED
from memory_manager.core.layout import BLOCK_SIZE, READY, Pool
from memory_manager.errors import OutOfRangeError
from memory_manager.tables import Tables
from memory_manager.views import AllRemoved, Event, Removed, Stored

_CAPACITY = 16_384

Change = Stored | Removed | AllRemoved


class EventLog:
    """A bounded ring; recording starts when somebody first asks."""

    def __init__(self) -> None:
        self.is_recording = False
        # Above all numbers of earlier starts, so that theirs are known to be gone.
        self.last_seq = time.time_ns() // 1000
        self._ring: deque[Event] = deque(maxlen=_CAPACITY)

    def add(self, engine_id: str, change: Change) -> None:
        if self.is_recording:
            self.last_seq += 1
            self._ring.append(Event(self.last_seq, engine_id, change))

    def after(self, seq: int) -> list[Event]:
        """Raises OutOfRangeError / EVENTS_DROPPED when an event after `seq` is gone."""
        num_wanted = self.last_seq - seq
        if not 0 <= num_wanted <= len(self._ring):
            raise OutOfRangeError(
                "EVENTS_DROPPED", f"events after {seq} are gone; start again from a snapshot (after_seq 0)"
            )
        return list(self._ring)[len(self._ring) - num_wanted :]


def drain_changes(tables: Tables) -> list[Change]:
    """Empties the log of changes. Blocks that came and went since the last time are left out."""
    pool = tables.pool
    log = pool.changes[: int(pool.counters["num_changes"][0])].copy()
    pool.counters["num_changes"] = 0
    stored = log["block"][log["kind"] == STORED]
    removed = log["block"][log["kind"] == REMOVED]
    fleeting = set(stored.tolist()) & set(removed.tolist())
    changes: list[Change] = [
        _stored(pool, chain) for chain in _chains(pool, [b for b in stored.tolist() if b not in fleeting])
    ]
    gone = [b for b in removed.tolist() if b not in fleeting]
    return [Removed(np.array(gone, np.int32)), *changes] if gone else changes


def whole_cache(tables: Tables) -> list[Change]:
    """The cache as events: nothing, then everything, parents first."""
    pool = tables.pool
    ready = np.flatnonzero(pool.state == READY)
    by_path = sorted(ready.tolist(), key=lambda block: _path(pool, block))
    return [AllRemoved(), *(_stored(pool, chain) for chain in _chains(pool, by_path))]


def _path(pool: Pool, block: int) -> list[int]:
    path = [block]
    while (parent := int(pool.nodes["parent"][path[-1]])) < pool.nodes.size:
        path.append(parent)
    return path[::-1]


def _chains(pool: Pool, blocks: list[int]) -> Iterator[list[int]]:
    """Cuts a list of blocks into runs in which each is the next one's parent."""
    chain: list[int] = []
    for block in blocks:
        if chain and pool.nodes["parent"][block] != chain[-1]:
            yield chain
            chain = []
        chain.append(block)
    if chain:
        yield chain


def _stored(pool: Pool, chain: list[int]) -> Stored:
    blocks = np.array(chain, np.int32)
    parent = int(pool.nodes["parent"][chain[0]])
    return Stored(
        blocks=blocks,
        tokens=pool.tokens.reshape(-1, BLOCK_SIZE)[blocks].reshape(-1),
        parent_block=parent if parent < pool.nodes.size else None,
    )
