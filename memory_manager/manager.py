"""The memory manager: epochs, leases and times around the state; the journal and the events of its changes.

One thread owns it.
"""

import secrets
import time
from collections.abc import Callable
from typing import Any

from memory_manager.answers import UpdateAnswer
from memory_manager.codec import encode_update
from memory_manager.columns import INT32, Int32s, freeze
from memory_manager.config import MemoryConfig
from memory_manager.core.layout import BLOCK_SIZE
from memory_manager.engine_pool import EnginePool
from memory_manager.errors import InvalidRequestError
from memory_manager.events import EventLog, drain_changes, whole_cache
from memory_manager.integrity import check_pool, subject_of
from memory_manager.journal.journal import Journal
from memory_manager.journal.records import Kind, config_to_facts, encode_facts
from memory_manager.reader import Reader
from memory_manager.repair import repair_pool
from memory_manager.requests import UpdateRequest
from memory_manager.state import State
from memory_manager.views import (
    AllRemoved,
    Cleared,
    Event,
    Mended,
    Pin,
    Registration,
)
from memory_manager.warm_up import warm_up

_COUNTER_BITS = 32
MAX_POOL_BLOCKS = 1 << 26


class MemoryManager(Reader):
    """Owns all mutable state. A call that raises has changed nothing."""

    def __init__(self, config: MemoryConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """Comes up as its journal says, if there is one. `clock` answers seconds.

        Raises JournalCorruptError, and MemoryManagerError / JOURNAL_LOCKED.
        """
        self._config = config
        self._clock = clock
        self._started_at = clock()
        self._events = EventLog()
        self._lease_ends_at: dict[int, float] = {}  # seconds, by epoch
        warm_up()  # so that no request pays for compiling
        self._journal = None if config.journal is None else Journal(config.journal, clock)
        self._state = self._recovered() or State(config)
        # A manager that lost (the end of) its journal must not mistake an old engine for one of its own, so
        # an epoch is a 31-bit nonce, new at every start, and a counter.
        self._state.last_epoch = (secrets.randbits(31) or 1) << _COUNTER_BITS
        self._commit()

    def _recovered(self) -> State | None:
        state = self._journal.load(self._config, self._now_us()) if self._journal is not None else None
        if state is not None:
            for epoch in state.engines:
                self._renew_lease(epoch)
            facts = config_to_facts(self._config)
            if facts != config_to_facts(state.config):
                state.configure(self._config)
                self._record(Kind.CONFIGURE, facts)
        return state

    def warm_up(self) -> None:
        """Has been done by the constructor: compiles the core, or loads it from numba's cache."""
        warm_up()

    def commit(self) -> None:
        """With `group_commit`: writes what has been done since the last time. Answers must wait for it.

        Raises JournalUnavailableError; what was done stands, and the next commit tries again.
        """
        if self._journal is not None:
            self._journal.commit(self._state)

    def close(self) -> None:
        """Gives the journal back; without it nothing needs to be closed."""
        if self._journal is not None:
            self._journal.close()

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
        for engine in list(self._state.engines.values()):
            if engine.engine_id == engine_id:
                self._end_epoch(engine.epoch)
        epoch = self._state.last_epoch + 1
        secret = secrets.token_bytes(64)
        self._state.register(epoch, engine_id, num_blocks, model_fingerprint, secret)
        if self._events.is_recording:
            self._state.engine(epoch).tables.log_changes()
        self._record(
            Kind.REGISTER,
            {
                "epoch": epoch,
                "engine_id": engine_id,
                "num_blocks": num_blocks,
                "model_fingerprint": model_fingerprint,
                "secret": secret.hex(),
            },
        )
        self._renew_lease(epoch)
        self._commit()
        return Registration(epoch, self._config.lease_ms, self._config.heartbeat_interval_ms)

    def heartbeat(self, epoch: int) -> None:
        """Renews the lease. Raises PreconditionError / STALE_EPOCH."""
        self._state.engine(epoch)
        self._renew_lease(epoch)

    def update_sequences(self, request: UpdateRequest) -> UpdateAnswer:
        """Executes an engine's call, or repeats the answer to its last one; renews the lease.

        Raises PreconditionError (STALE_EPOCH, OP_SEQ_GAP) and InvalidRequestError.
        """
        engine = self._state.engine(request.epoch)
        now_us = self._now_us()
        last_op_seq = engine.last_call.op_seq
        answer = engine.update(request, now_us)
        self._lease_ends_at[request.epoch] = now_us / 1e6 + self._config.lease_ms / 1e3
        if self._journal is not None:
            if request.op_seq != last_op_seq:
                self._journal.append(Kind.UPDATE, encode_update(now_us, request, answer))
            self._commit()
        self._record_events(engine)
        return answer

    def reap_expired(self) -> list[int]:
        """Ends pins whose time is over, and epochs whose lease is over with all their blocks.

        Answers the epochs.
        """
        self._expire_pins()
        now = self._clock()
        expired = [epoch for epoch, ends_at in self._lease_ends_at.items() if ends_at <= now]
        for epoch in expired:
            self._end_epoch(epoch)
        self._commit()
        return expired

    # Prefixes

    def pin_prefix(
        self, engine_id: str, tenant: str, salt: str, adapter: str, tokens: Int32s, ttl_ms: int
    ) -> Pin:
        """Keeps a cached prefix from being evicted until its time is over.

        Raises InvalidRequestError, NotFoundError (UNKNOWN_ENGINE, NOT_CACHED) and ExhaustedError / PIN_CAP.
        """
        freeze(tokens, INT32, "tokens")
        if ttl_ms <= 0:
            raise InvalidRequestError("BAD_TTL", f"ttl_ms must be > 0, not {ttl_ms}")
        epoch = self._engine(engine_id).epoch
        self._expire_pins()
        now_us = self._now_us()
        pin = self._state.pin(epoch, tenant, (salt, adapter), tokens, ttl_ms, now_us)
        self._record(
            Kind.PIN,
            {
                "epoch": epoch,
                "tenant": tenant,
                "namespace": (salt, adapter),
                "tokens": tokens.tolist(),
                "ttl_ms": ttl_ms,
                "now_us": now_us,
            },
        )
        self._commit()
        return pin

    def unpin_prefix(self, pin_id: int) -> None:
        """Ends a pin, if it has not ended."""
        self._unpin(pin_id)
        self._commit()

    def clear_cache(self, engine_id: str = "", salt: str | None = None) -> Cleared:
        """Forgets prefixes and texts, of all engines without a name, of one salt's namespaces with `salt`.

        Blocks that running sequences hold are detached now and freed with their last holder. Nothing of
        what was forgotten stays in the journal.
        """
        engines = [self._engine(engine_id)] if engine_id else list(self._state.engines.values())
        if not engine_id:
            self._state.forget_texts(salt)
        now_us = self._now_us()
        cleared = []
        for engine in engines:
            cleared.append(self._state.clear(engine.epoch, salt, now_us))
            self._record_events(engine)
        if self._journal is not None:
            self._journal.purge(self._state)
        return Cleared(sum(c.num_freed for c in cleared), sum(c.num_detached for c in cleared))

    def events(self, after_seq: int) -> list[Event]:
        """What was stored and removed after an event; 0: a snapshot, all with the number to go on from.

        Raises OutOfRangeError / EVENTS_DROPPED.
        """
        if not self._events.is_recording:
            self._events.is_recording = True
            for engine in self._state.engines.values():
                engine.tables.log_changes()
        if after_seq != 0:
            return self._events.after(after_seq)
        return [
            Event(self._events.last_seq, engine.engine_id, change)
            for engine in self._state.engines.values()
            for change in whole_cache(engine.tables)
        ]

    def mend(self, epoch: int) -> Mended:
        """For a pool that was found violated: what is doubtful is quarantined, the accounts are redone.

        An epoch that cannot be mended ends; its engine registers anew.
        """
        engine = self._state.engine(epoch)
        with engine.changing(self._now_us()):
            quarantined = repair_pool(subject_of(engine))
        for change in whole_cache(engine.tables):
            self._events.add(engine.engine_id, change)
        is_sound = not check_pool(subject_of(engine))
        if not is_sound:
            self._end_epoch(epoch)
        if self._journal is not None:
            self._journal.restart(self._state)
        return Mended(quarantined, has_ended=not is_sound)

    def _now_us(self) -> int:
        return int(self._clock() * 1e6)

    def _renew_lease(self, epoch: int) -> None:
        self._lease_ends_at[epoch] = self._clock() + self._config.lease_ms / 1e3

    def _end_epoch(self, epoch: int) -> None:
        self._events.add(self._state.engine(epoch).engine_id, AllRemoved())
        self._state.end_epoch(epoch)
        self._record(Kind.END_EPOCH, {"epoch": epoch})
        del self._lease_ends_at[epoch]

    def _expire_pins(self) -> None:
        now_us = self._now_us()
        for engine in self._state.engines.values():
            for pin_id in engine.pins.expired(now_us):
                self._unpin(pin_id)

    def _unpin(self, pin_id: int) -> None:
        now_us = self._now_us()
        if self._state.unpin(pin_id, now_us):
            self._record(Kind.UNPIN, {"pin_id": pin_id, "now_us": now_us})

    def _record_events(self, engine: EnginePool) -> None:
        if engine.num_changes:
            for change in drain_changes(engine.tables):
                self._events.add(engine.engine_id, change)

    def _record(self, kind: Kind, facts: dict[str, Any]) -> None:
        if self._journal is not None:
            self._journal.append(kind, encode_facts(facts))

    def _commit(self) -> None:
        if self._config.journal is not None and not self._config.journal.group_commit:
            self.commit()
