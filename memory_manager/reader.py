"""What can be asked of a memory manager without changing it."""

from collections.abc import Callable, Mapping

from memory_manager.columns import INT32, Int32s, freeze
from memory_manager.core.layout import BLOCK_SIZE
from memory_manager.engine_pool import EnginePool
from memory_manager.errors import NotFoundError
from memory_manager.inspection import engine_stats, inspect_blocks, state_bytes
from memory_manager.integrity import Subject, check_pool, copy_of, subject_of
from memory_manager.journal.journal import Journal
from memory_manager.state import State
from memory_manager.views import BlockSnapshot, EngineMatch, Explanation, Stats


class Reader:
    """The reading half of MemoryManager."""

    _state: State
    _journal: Journal | None
    _clock: Callable[[], float]
    _started_at: float

    def lookup_prefix(
        self, model_fingerprint: str, salt: str, adapter: str, tokens: Int32s
    ) -> list[EngineMatch]:
        """How much of a prompt each engine of the model holds, longest first. Touches nothing.

        At least the last token is left to compute, as in an acquire.
        """
        freeze(tokens, INT32, "tokens")
        limit = (tokens.size - 1) // BLOCK_SIZE
        matches = []
        for engine in self._state.engines.values():
            if engine.model_fingerprint == model_fingerprint:
                prefix = engine.tables.find_prefix((salt, adapter), tokens, limit)
                matches.append(EngineMatch(engine.engine_id, prefix.num_blocks * BLOCK_SIZE))
        matches.sort(key=_by_num_cached, reverse=True)
        return matches

    def stats(self) -> Stats:
        engines = self._state.engines.values()
        return Stats(
            engines=tuple(map(engine_stats, engines)),
            bytes_of_state=sum(map(state_bytes, engines)),
            draft_index_bytes=self._state.drafts.num_bytes,
            uptime_s=self._clock() - self._started_at,
            journal_bytes=None if self._journal is None else self._journal.num_bytes,
        )

    def inspect_blocks(self, engine_id: str = "") -> BlockSnapshot:
        """Every block of a pool; without a name, of the only one. Raises NotFoundError / UNKNOWN_ENGINE.

        Any thread may call it; while updates keep coming, the picture may mix two moments.
        """
        return inspect_blocks(self._engine(engine_id))

    def explain(self, engine_id: str, sequence_id: int, *, administrator: bool = False) -> Explanation:
        """Why a sequence hit or missed the cache. Raises NotFoundError (UNKNOWN_ENGINE, UNKNOWN_SEQUENCE)."""
        return self._engine(engine_id).explanations.explain(sequence_id, administrator=administrator)

    def check_integrity(self) -> list[str]:
        """Recomputes every invariant from scratch; answers what is violated."""
        engines = self._state.engines.values()
        return violations_of({engine.engine_id: subject_of(engine) for engine in engines})

    def copies_to_check(self) -> dict[str, Subject]:
        """Copies of all pools by their engines, for another thread to examine by `violations_of`."""
        return {engine.engine_id: copy_of(engine) for engine in self._state.engines.values()}

    def _engine(self, engine_id: str) -> EnginePool:
        engines = list(self._state.engines.values())
        for engine in engines:
            if engine.engine_id == engine_id or (not engine_id and len(engines) == 1):
                return engine
        raise NotFoundError("UNKNOWN_ENGINE", f"no engine {engine_id!r} is registered")


def violations_of(subjects: Mapping[str, Subject]) -> list[str]:
    """What is violated in pools, by their engines."""
    return [
        f"{engine_id}: {violation}"
        for engine_id, subject in subjects.items()
        for violation in check_pool(subject)
    ]


def _by_num_cached(match: EngineMatch) -> int:
    return match.num_cached
