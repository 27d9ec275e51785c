"""The memory manager: every engine's pool, its epochs and leases. One thread owns it."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from memory_manager.answers import UpdateAnswer
from memory_manager.columns import INT32, Int32s, freeze
from memory_manager.config import MemoryConfig
from memory_manager.core.layout import BLOCK_SIZE
from memory_manager.engine_pool import EnginePool, Namespace
from memory_manager.errors import InvalidRequestError, NotFoundError, PreconditionError
from memory_manager.inspection import engine_stats, inspect_blocks, state_bytes
from memory_manager.integrity import check_pool
from memory_manager.pins import check_ttl
from memory_manager.requests import UpdateRequest
from memory_manager.views import BlockSnapshot, Cleared, EngineMatch, Pin, Registration, Stats
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

    def register_engine(
        self, engine_id: str, num_blocks: int, block_size: int, model_fingerprint: str
    ) -> Registration:
        """Opens an epoch; an older one of the same engine ends. Raises InvalidRequestError."""
        if not 1 <= num_blocks <= MAX_POOL_BLOCKS:
            raise InvalidRequestError("BAD_POOL_SIZE", f"num_blocks must be 1 to {MAX_POOL_BLOCKS}")
        if block_size != BLOCK_SIZE:
            raise InvalidRequestError("BAD_BLOCK_SIZE", f"block_size must be {BLOCK_SIZE}, not {block_size}")
        for epoch, engine in list(self._engines.items()):
            if engine.pool.engine_id == engine_id:
                del self._engines[epoch]
        self._last_epoch += 1
        pool = EnginePool(engine_id, self._last_epoch, num_blocks, model_fingerprint, self._config)
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
        answer = engine.pool.update(request)
        engine.lease_ends_at = self._clock() + self._config.lease_ms / 1000
        return answer

    def lookup_prefix(
        self, model_fingerprint: str, salt: str, adapter: str, tokens: Int32s
    ) -> list[EngineMatch]:
        """How much of a prompt each engine of the model holds, longest first. Touches nothing."""
        freeze(tokens, INT32, "tokens")
        matches = [
            EngineMatch(engine.pool.engine_id, _num_cached(engine.pool, (salt, adapter), tokens))
            for engine in self._engines.values()
            if engine.pool.model_fingerprint == model_fingerprint
        ]
        return sorted(matches, key=lambda match: -match.num_cached)

    def pin_prefix(
        self, engine_id: str, tenant: str, salt: str, adapter: str, tokens: Int32s, ttl_ms: int
    ) -> Pin:
        """Keeps a cached prefix from being evicted until its time is over.

        Raises InvalidRequestError, NotFoundError (UNKNOWN_ENGINE, NOT_CACHED) and ExhaustedError / PIN_CAP.
        """
        check_ttl(ttl_ms)
        pool = self._pool_of(engine_id)
        self._expire_pins()
        expires_at = self._clock() + ttl_ms / 1000
        pin = pool.pins.add(self._last_pin_id + 1, tenant, (salt, adapter), tokens, expires_at)
        self._last_pin_id = pin.pin_id
        return pin

    def unpin_prefix(self, pin_id: int) -> None:
        """Ends a pin, if it has not ended."""
        for engine in self._engines.values():
            engine.pool.pins.remove(pin_id)

    def clear_cache(self, engine_id: str = "", salt: str | None = None) -> Cleared:
        """Forgets cached prefixes, of all engines without a name, of one salt's namespaces with `salt`.

        Blocks that running sequences hold are detached now and freed with their last holder.
        """
        pools = [self._pool_of(engine_id)] if engine_id else [e.pool for e in self._engines.values()]
        cleared = [pool.clear(lambda namespace: salt in (None, namespace[0])) for pool in pools]
        return Cleared(sum(c.num_freed for c in cleared), sum(c.num_detached for c in cleared))

    def reap_expired(self) -> list[int]:
        """Ends pins whose time is over, and epochs whose lease is over with all their blocks.

        Answers the epochs.
        """
        self._expire_pins()
        now = self._clock()
        expired = [epoch for epoch, engine in self._engines.items() if engine.lease_ends_at <= now]
        for epoch in expired:
            del self._engines[epoch]
        return expired

    def stats(self) -> Stats:
        engines = [engine.pool for engine in self._engines.values()]
        return Stats(
            engines=tuple(map(engine_stats, engines)),
            bytes_of_state=sum(map(state_bytes, engines)),
            uptime_s=self._clock() - self._started_at,
        )

    def inspect_blocks(self, engine_id: str = "") -> BlockSnapshot:
        """Every block of a pool; without a name, of the only one. Raises NotFoundError."""
        return inspect_blocks(self._pool_of(engine_id))

    def check_integrity(self) -> list[str]:
        """Recomputes every invariant from scratch; answers what is violated."""
        return [
            f"{engine.pool.engine_id}: {violation}"
            for engine in self._engines.values()
            for violation in check_pool(engine.pool)
        ]

    def warm_up(self) -> None:
        """Compiles the core, or loads it from numba's cache, so that no request pays for it."""
        warm_up(self._config)

    def _expire_pins(self) -> None:
        now = self._clock()
        for engine in self._engines.values():
            for pin_id in engine.pool.pins.expired(now):
                engine.pool.pins.remove(pin_id)

    def _find(self, epoch: int) -> _Engine:
        engine = self._engines.get(epoch)
        if engine is None:
            raise PreconditionError("STALE_EPOCH", f"epoch {epoch} is unknown or over; register anew")
        return engine

    def _pool_of(self, engine_id: str) -> EnginePool:
        pools = [engine.pool for engine in self._engines.values()]
        for pool in pools:
            if pool.engine_id == engine_id or (not engine_id and len(pools) == 1):
                return pool
        raise NotFoundError("UNKNOWN_ENGINE", f"no engine {engine_id!r} is registered")


def _num_cached(pool: EnginePool, namespace: Namespace, tokens: Int32s) -> int:
    """Tokens of a prompt that an acquire would find; at least the last one is left to compute."""
    return pool.find_prefix(namespace, tokens, (tokens.size - 1) // BLOCK_SIZE).num_blocks * BLOCK_SIZE
