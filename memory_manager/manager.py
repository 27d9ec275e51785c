"""The memory manager: every engine's pool, its epochs and leases. One thread owns it."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from memory_manager.answers import UpdateAnswer
from memory_manager.columns import Int32s
from memory_manager.config import MemoryConfig
from memory_manager.core.layout import BLOCK_SIZE
from memory_manager.engine_pool import EnginePool
from memory_manager.errors import InvalidRequestError, NotFoundError, PreconditionError
from memory_manager.inspection import engine_stats, inspect_blocks, state_bytes
from memory_manager.integrity import check_pool
from memory_manager.requests import UpdateRequest
from memory_manager.views import BlockSnapshot, EngineMatch, Registration, Stats
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
        matches = [
            EngineMatch(engine.pool.engine_id, engine.pool.count_cached((salt, adapter), tokens))
            for engine in self._engines.values()
            if engine.pool.model_fingerprint == model_fingerprint
        ]
        return sorted(matches, key=lambda match: -match.num_cached)

    def reap_expired(self) -> list[int]:
        """Ends the epochs whose lease is over, with all their blocks; answers them."""
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
