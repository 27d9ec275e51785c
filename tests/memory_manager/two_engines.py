"""Two engines and three tenants at one manager with a journal, making random calls.

Run as a program it makes calls until it is killed, and prints their number after each.
"""

import random
import sys
from pathlib import Path

from memory_manager import JournalConfig, MemoryConfig, MemoryManager, TenantLimits
from tests.memory_manager.model_texts import Texts
from tests.memory_manager.random_calls import MIXES, RandomCalls
from tests.memory_manager.side_by_side import DRAFT_INDEX_TOKENS, SideBySide

TENANTS = {"a": TenantLimits(quota=20), "b": TenantLimits(floor=6)}


def open_manager(directory: Path | None) -> MemoryManager:
    journal = None if directory is None else JournalConfig(directory, fsync="never")
    config = MemoryConfig(
        tenants=TENANTS,
        min_wait_blocks=2,
        journal=journal,
        lease_ms=10**9,
        draft_index_tokens=DRAFT_INDEX_TOKENS,
    )
    return MemoryManager(config, lambda: 0.0)


class TwoEngines:
    def __init__(self, manager: MemoryManager, seed: int) -> None:
        texts = Texts(DRAFT_INDEX_TOKENS)
        self.engines = [
            SideBySide(n, TENANTS, manager=manager, engine_id=f"e{n}", texts=texts) for n in (24, 64)
        ]
        namespaces = [("", ""), ("salt", "")]
        self.callers = [
            RandomCalls(engine, seed + i, ["a", "b", "c"], namespaces)
            for i, engine in enumerate(self.engines)
        ]
        self.rng = random.Random(seed)

    def step(self) -> None:
        """One call of one of them."""
        self.rng.choice(self.callers).run(MIXES[0], 1)

    def reconnect(self, manager: MemoryManager) -> None:
        for engine in self.engines:
            engine.manager = manager

    def compare(self) -> None:
        for engine in self.engines:
            engine.compare()

    @property
    def op_seqs(self) -> list[int]:
        return [engine.op_seq for engine in self.engines]


if __name__ == "__main__":
    two = TwoEngines(open_manager(Path(sys.argv[1])), seed=int(sys.argv[2]))
    while True:
        two.step()
        print(*two.op_seqs, flush=True)
