"""Everything that must survive: engines, their pools and pins. Every change is one deterministic method.

A journal records these calls; replaying them gives the same state and the same answers.
"""

from memory_manager.answers import UpdateAnswer
from memory_manager.columns import Int32s
from memory_manager.config import MemoryConfig
from memory_manager.draft_index import DraftIndex, TextNamespace
from memory_manager.engine_pool import EnginePool
from memory_manager.errors import PreconditionError
from memory_manager.requests import UpdateRequest
from memory_manager.views import Cleared, Pin


class State:
    def __init__(self, config: MemoryConfig) -> None:
        self.config = config
        self.drafts = DraftIndex(config.draft_index_tokens)
        self.engines: dict[int, EnginePool] = {}  # by epoch
        self.last_epoch = 0
        self.last_pin_id = 0

    def engine(self, epoch: int) -> EnginePool:
        engine = self.engines.get(epoch)
        if engine is None:
            raise PreconditionError("STALE_EPOCH", f"epoch {epoch} is unknown or over; register anew")
        return engine

    def configure(self, config: MemoryConfig) -> None:
        self.config = config
        self.drafts.configure(config.draft_index_tokens)
        for engine in self.engines.values():
            engine.configure(config)

    def register(
        self, epoch: int, engine_id: str, num_blocks: int, model_fingerprint: str, secret: bytes
    ) -> None:
        self.engines[epoch] = EnginePool(
            engine_id, epoch, num_blocks, model_fingerprint, secret, self.config, self.drafts
        )
        self.last_epoch = epoch

    def end_epoch(self, epoch: int) -> None:
        del self.engines[epoch]

    def update(self, request: UpdateRequest, now_us: int) -> UpdateAnswer:
        return self.engine(request.epoch).update(request, now_us)

    def pin(
        self, epoch: int, tenant: str, namespace: tuple[str, str], tokens: Int32s, ttl_ms: int, now_us: int
    ) -> Pin:
        engine = self.engine(epoch)
        with engine.changing(now_us):
            pin = engine.pins.add(self.last_pin_id + 1, tenant, namespace, tokens, ttl_ms, now_us)
        self.last_pin_id = pin.pin_id
        return pin

    def unpin(self, pin_id: int, now_us: int) -> bool:
        """Whether there was such a pin."""
        for engine in self.engines.values():
            if pin_id in engine.pins:
                with engine.changing(now_us):
                    engine.pins.remove(pin_id)
                return True
        return False

    def clear(self, epoch: int, salt: str | None, now_us: int) -> Cleared:
        engine = self.engine(epoch)
        self.forget_texts(salt, engine.model_fingerprint)
        with engine.changing(now_us):
            return engine.clear(lambda namespace: salt in (None, namespace[0]))

    def forget_texts(self, salt: str | None, model_fingerprint: str | None = None) -> None:
        """Of all salts, of all models where None is given."""

        def is_meant(namespace: TextNamespace) -> bool:
            return salt in (None, namespace.salt) and model_fingerprint in (
                None,
                namespace.model_fingerprint,
            )

        self.drafts.forget(is_meant)
