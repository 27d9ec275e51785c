"""The memory manager: every engine's pool, its epochs and leases. One thread owns it."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from memory_manager.answers import UpdateAnswer
from memory_manager.columns import INT32, Int32s, freeze
from memory_manager.config import MemoryConfig
from memory_manager.core.layout import BLOCK_SIZE
from memory_manager.engine_pool import EnginePool
from memory_manager.errors import InvalidRequestError, NotFoundError, PreconditionError
from memory_manager.events import EventLog, drain_changes, whole_cache
from memory_manager.inspection import engine_stats, inspect_blocks, state_bytes
from memory_manager.integrity import check_pool
from memory_manager.requests import UpdateRequest
from memory_manager.views import (
    AllRemoved,
    BlockSnapshot,
    Cleared,
    EngineMatch,
    Event,
    Explanation,
    Pin,
    Registration,
    Stats,
)
from memory_manager.warm_up import warm_up

# Epochs are a 31-bit nonce and a counter, so a manager that lost its state cannot mistake an old engine
# for one of its own.
_COUNTER_BITS = 32
MAX_POOL_BLOCKS = 1 << 26


@dataclass
class _Engine:
    pool: EnginePool
    lease_ends_at: float


class MemoryManager:
    """Owns all mutable state. A call that raises has changed nothing."""

    def __init__(self, config: MemoryConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` answers seconds."""
        self._config = config
        self._clock = clock
        self._started_at = clock()
        self._last_epoch = (secrets.randbits(31) or 1) << _COUNTER_BITS
        self._last_pin_id = 0
        self._engines: dict[int, _Engine] = {}  # by epoch
        self._events = EventLog()

    def warm_up(self) -> None:
        """Compiles the core, or loads it from numba's cache, so that no request pays for it."""
        warm_up(self._config)

    # Engines

    def register_engine(
        self, engine_id: str, num_blocks: int, block_size: int, model_fingerprint: str
    ) -> Registration:
        """Opens an epoch; an older one of the same engine ends. Raises InvalidRequestError."""
        if not 1 <= num_blocks <= MAX_POOL_BLOCKS:
            raise InvalidRequestError("BAD_POOL_SIZE", f"num_blocks must be 1 to {MAX_POOL_BLOCKS}")
        if block_size != BLOCK_SIZE:
            raise InvalidRequestError("BAD_BLOCK_SIZE", f"block_size must be {BLOCK_SIZE}, not {block_size}")
        num_promised = sum(limits.floor for limits in self._config.tenants.values())
        if num_promised > num_blocks:
            raise InvalidRequestError(
                "BAD_POOL_SIZE", f"num_blocks is {num_blocks}, the tenants' floors promise {num_promised}"
            )
        for epoch, engine in list(self._engines.items()):
            if engine.pool.engine_id == engine_id:
                self._end_epoch(epoch)
        self._last_epoch += 1
        pool = EnginePool(engine_id, self._last_epoch, num_blocks, model_fingerprint, self._config)
        if self._events.is_recording:
            pool.tables.log_changes()
        self._engines[pool.epoch] = _Engine(pool, 0.0)
        self.heartbeat(pool.epoch)
        return Registration(pool.epoch, self._config.lease_ms, self._config.heartbeat_interval_ms)

    def heartbeat(self, epoch: int) -> None:
        """Renews the lease. Raises PreconditionError / STALE_EPOCH."""
        self._find(epoch).lease_ends_at = self._clock() + self._config.lease_ms / 1000

    def update_sequences(self, request: UpdateRequest) -> UpdateAnswer:
        """Executes an engine's call, or repeats the answer to its last one; renews the lease.

        Raises PreconditionError (STALE_EPOCH, OP_SEQ_GAP) and InvalidRequestError.
        """
        engine = self._find(request.epoch)
        now = self._clock()
        answer = engine.pool.update(request, now)
        engine.lease_ends_at = now + self._config.lease_ms / 1000
        self._record_events(engine.pool)
        return answer

    def reap_expired(self) -> list[int]:
        """Ends pins whose time is over, and epochs whose lease is over with all their blocks.

        Answers the epochs.
        """
        self._expire_pins()
        now = self._clock()
        expired = [epoch for epoch, engine in self._engines.items() if engine.lease_ends_at <= now]
        for epoch in expired:
            self._end_epoch(epoch)
        return expired

    # Prefixes

    def lookup_prefix(
        self, model_fingerprint: str, salt: str, adapter: str, tokens: Int32s
    ) -> list[EngineMatch]:
        """How much of a prompt each engine of the model holds, longest first. Touches nothing.

        At least the last token is left to compute, as in an acquire.
        """
        freeze(tokens, INT32, "tokens")
        limit = (tokens.size - 1) // BLOCK_SIZE
        matches = [
            EngineMatch(pool.engine_id, BLOCK_SIZE * prefix.num_blocks)
            for pool in self._pools()
            if pool.model_fingerprint == model_fingerprint
            for prefix in [pool.tables.find_prefix((salt, adapter), tokens, limit)]
        ]
        return sorted(matches, key=lambda match: -match.num_cached)

    def pin_prefix(
        self, engine_id: str, tenant: str, salt: str, adapter: str, tokens: Int32s, ttl_ms: int
    ) -> Pin:
        """Keeps a cached prefix from being evicted until its time is over.

        Raises InvalidRequestError, NotFoundError (UNKNOWN_ENGINE, NOT_CACHED) and ExhaustedError / PIN_CAP.
        """
        freeze(tokens, INT32, "tokens")
        if ttl_ms <= 0:
            raise InvalidRequestError("BAD_TTL", f"ttl_ms must be > 0, not {ttl_ms}")
        pool = self._pool_of(engine_id)
        self._expire_pins()
        now = self._clock()
        with pool.changing(now):
            pin = pool.pins.add(self._last_pin_id + 1, tenant, (salt, adapter), tokens, now + ttl_ms / 1000)
        self._last_pin_id = pin.pin_id
        return pin

    def unpin_prefix(self, pin_id: int) -> None:
        """Ends a pin, if it has not ended."""
        for pool in self._pools():
            if pin_id in pool.pins:
                with pool.changing(self._clock()):
                    pool.pins.remove(pin_id)

    def clear_cache(self, engine_id: str = "", salt: str | None = None) -> Cleared:
        """Forgets cached prefixes, of all engines without a name, of one salt's namespaces with `salt`.

        Blocks that running sequences hold are detached now and freed with their last holder.
        """
        num_freed = num_detached = 0
        for pool in [self._pool_of(engine_id)] if engine_id else self._pools():
            with pool.changing(self._clock()):
                cleared = pool.clear(lambda namespace: salt in (None, namespace[0]))
            num_freed += cleared.num_freed
            num_detached += cleared.num_detached
            self._record_events(pool)
        return Cleared(num_freed, num_detached)

    # Reading

    def stats(self) -> Stats:
        pools = self._pools()
        return Stats(
            engines=tuple(map(engine_stats, pools)),
            bytes_of_state=sum(map(state_bytes, pools)),
            uptime_s=self._clock() - self._started_at,
        )

    def inspect_blocks(self, engine_id: str = "") -> BlockSnapshot:
        """Every block of a pool; without a name, of the only one.

        Any thread may call it. Raises NotFoundError / UNKNOWN_ENGINE, and ExhaustedError / BUSY when the
        owner's updates kept interfering.
        """
        return inspect_blocks(self._pool_of(engine_id))

    def explain(self, engine_id: str, sequence_id: int, *, administrator: bool = False) -> Explanation:
        """Why a sequence hit or missed the cache. Raises NotFoundError (UNKNOWN_ENGINE, UNKNOWN_SEQUENCE)."""
        return self._pool_of(engine_id).explanations.explain(sequence_id, administrator=administrator)

    def events(self, after_seq: int) -> list[Event]:
        """What was stored and removed after an event; 0: a snapshot, all with the number to go on from.

        Raises OutOfRangeError / EVENTS_DROPPED.
        """
        if not self._events.is_recording:
            self._events.is_recording = True
            for pool in self._pools():
                pool.tables.log_changes()
        if after_seq != 0:
            return self._events.after(after_seq)
        return [
            Event(self._events.last_seq, pool.engine_id, change)
            for pool in self._pools()
            for change in whole_cache(pool.tables)
        ]

    def check_integrity(self) -> list[str]:
        """Recomputes every invariant from scratch; answers what is violated."""
        return [f"{pool.engine_id}: {violation}" for pool in self._pools() for violation in check_pool(pool)]

    def _pools(self) -> list[EnginePool]:
        return [engine.pool for engine in self._engines.values()]

    def _find(self, epoch: int) -> _Engine:
        engine = self._engines.get(epoch)
        if engine is None:
            raise PreconditionError("STALE_EPOCH", f"epoch {epoch} is unknown or over; register anew")
        return engine

    def _pool_of(self, engine_id: str) -> EnginePool:
        pools = self._pools()
        for pool in pools:
            if pool.engine_id == engine_id or (not engine_id and len(pools) == 1):
                return pool
        raise NotFoundError("UNKNOWN_ENGINE", f"no engine {engine_id!r} is registered")

    def _end_epoch(self, epoch: int) -> None:
        engine = self._engines.pop(epoch)
        self._events.add(engine.pool.engine_id, AllRemoved())

    def _expire_pins(self) -> None:
        now = self._clock()
        for pool in self._pools():
            for pin_id in pool.pins.expired(now):
                with pool.changing(now):
                    pool.pins.remove(pin_id)

    def _record_events(self, pool: EnginePool) -> None:
        if pool.num_changes:
            for change in drain_changes(pool.tables):
                self._events.add(pool.engine_id, change)
