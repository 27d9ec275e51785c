"""The memory manager's figures, through the entry points that the RPCs use, with all checks on.

Throughputs are the best of several rounds, latencies medians.
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from memory_manager import (
    Acquire,
    Advance,
    JournalConfig,
    MemoryConfig,
    MemoryManager,
    Release,
    Room,
    Truncate,
    UpdateAnswer,
    UpdateRequest,
)

BLOCK = 16
MODEL = "model"
Int32s = npt.NDArray[np.int32]


class Engine:
    """One engine's side of a manager: keeps op_seq, is always idle between calls."""

    def __init__(self, num_blocks: int, journal: JournalConfig | None = None) -> None:
        self.manager = MemoryManager(MemoryConfig(journal=journal, lease_ms=10**9))
        self.epoch = self.manager.register_engine("bench", num_blocks, BLOCK, MODEL).epoch
        self.op_seq = 0

    def request(self, **lists: Any) -> UpdateRequest:
        self.op_seq += 1
        return UpdateRequest(self.epoch, self.op_seq, self.op_seq, self.op_seq, **lists)

    def call(self, **lists: Any) -> UpdateAnswer:
        return self.manager.update_sequences(self.request(**lists))

    def timed(self, request: UpdateRequest) -> float:
        """Seconds that the call took."""
        started = time.perf_counter()
        self.manager.update_sequences(request)
        return time.perf_counter() - started


def int32s(values: Any) -> Int32s:
    return np.asarray(values, np.int32)


def random_tokens(rng: np.random.Generator, num_tokens: int) -> Int32s:
    return rng.integers(0, 50_000, num_tokens, dtype=np.int32)


def ids(num_sequences: int) -> npt.NDArray[np.int64]:
    return np.arange(1, num_sequences + 1)


def advance(num_sequences: int, tokens: Int32s, num_written: int) -> Advance:
    """The same number of new tokens for each of the first `num_sequences` sequences."""
    counts = np.full(num_sequences, tokens.size // num_sequences, np.int32)
    return Advance(ids(num_sequences), counts, tokens, np.full(num_sequences, num_written, np.int32))


def alloc_free(num_blocks: int = 65_536, rounds: int = 30) -> float:
    """Blocks allocated and freed per second, each counted as one operation."""
    engine = Engine(num_blocks + 1)
    engine.call(acquires=(Acquire(1, int32s([1])),))
    one = np.array([1])
    engine.call(room=Room(one, int32s([BLOCK * num_blocks])))
    best = min(
        engine.timed(
            engine.request(truncate=Truncate(one, int32s([1])), room=Room(one, int32s([BLOCK * num_blocks])))
        )
        for _ in range(rounds)
    )
    return 2 * num_blocks / best


def seed_allocator(num_blocks: int = 65_536) -> float:
    """65,536 blocks allocated on a fresh pool, then freed."""
    engine = Engine(num_blocks + 1)
    engine.call(acquires=(Acquire(1, int32s([1])),))
    one = np.array([1])
    seconds = engine.timed(engine.request(room=Room(one, int32s([BLOCK * num_blocks]))))
    seconds += engine.timed(engine.request(truncate=Truncate(one, int32s([1]))))
    return 2 * num_blocks / seconds


def filled(num_blocks: int, prompt_blocks: int = 512) -> tuple[Engine, list[Int32s]]:
    """An engine whose pool is full of cached prompts."""
    rng = np.random.default_rng(0)
    engine = Engine(num_blocks)
    prompts = [random_tokens(rng, BLOCK * prompt_blocks) for _ in range(num_blocks // prompt_blocks)]
    one = np.array([1])
    for prompt in prompts:
        engine.call(acquires=(Acquire(1, prompt),))
        engine.call(advance=advance(1, int32s([]), prompt.size), release=Release(one))
    return engine, prompts


def match(num_blocks: int) -> float:
    """Blocks matched per second on a trie of so many blocks."""
    engine, prompts = filled(num_blocks)
    order = np.random.default_rng(1).integers(0, len(prompts), 1024)
    best = 0.0
    for start in range(0, len(order), 64):
        chosen = [prompts[i] for i in order[start : start + 64]]
        started = time.perf_counter()
        found = [engine.manager.lookup_prefix(MODEL, "", "", prompt)[0].num_cached for prompt in chosen]
        seconds = time.perf_counter() - started
        best = max(best, sum(found) / BLOCK / seconds)
    return best


def seed_radix(num_lookups: int = 100_000) -> float:
    """Single-chunk lookups, a fifth of which hit."""
    rng = np.random.default_rng(2)
    engine, prompts = filled(20_480, prompt_blocks=1)
    lookups = []
    for i in range(num_lookups):
        chunk = prompts[i % len(prompts)] if i % 5 == 0 else random_tokens(rng, BLOCK)
        lookups.append(np.append(chunk, int32s([1])))
    lookup = engine.manager.lookup_prefix
    started = time.perf_counter()
    hits = sum(lookup(MODEL, "", "", prompt)[0].num_cached for prompt in lookups)
    seconds = time.perf_counter() - started
    assert hits == num_lookups // 5 * BLOCK
    return num_lookups / seconds


def seal(num_sequences: int = 64, blocks_each: int = 32, rounds: int = 12) -> float:
    """Blocks sealed per second; their tokens arrive in the same call."""
    rng = np.random.default_rng(3)
    engine = Engine(num_sequences * (1 + blocks_each * rounds))
    acquires = tuple(Acquire(int(i), random_tokens(rng, BLOCK)) for i in ids(num_sequences))
    engine.call(acquires=acquires)
    best = 0.0
    for i in range(rounds):
        ahead = np.full(num_sequences, BLOCK * blocks_each, np.int32)
        engine.call(room=Room(ids(num_sequences), ahead))
        tokens = random_tokens(rng, num_sequences * blocks_each * BLOCK)
        num_written = BLOCK * (1 + blocks_each * (i + 1))
        seconds = engine.timed(engine.request(advance=advance(num_sequences, tokens, num_written)))
        best = max(best, num_sequences * blocks_each / seconds)
    return best


def evict(num_blocks: int = 65_536) -> float:
    """Cached blocks evicted (and handed out) per second."""
    engine, _ = filled(num_blocks)
    one = np.array([10**6])
    engine.call(acquires=(Acquire(10**6, int32s([1])),))
    best = 0.0
    for i in range(1, 16):
        seconds = engine.timed(engine.request(room=Room(one, int32s([i * 4096 * BLOCK]))))
        best = max(best, 4096 / seconds)
    return best


def rollback(num_sequences: int = 1024, rounds: int = 30) -> float:
    """Truncations of one block each per second."""
    engine = Engine(4 * num_sequences)
    engine.call(acquires=tuple(Acquire(int(i), int32s([int(i)])) for i in ids(num_sequences)))
    kept, ahead = np.ones(num_sequences, np.int32), np.full(num_sequences, BLOCK, np.int32)
    best = 0.0
    for _ in range(rounds):
        engine.call(room=Room(ids(num_sequences), ahead))
        seconds = engine.timed(engine.request(truncate=Truncate(ids(num_sequences), kept)))
        best = max(best, num_sequences / seconds)
    return best


def decode_steps(engine: Engine, num_sequences: int, num_steps: int) -> Iterator[UpdateRequest]:
    """What a decode step says: a token for each sequence, room where a block is full, staggered."""
    rng = np.random.default_rng(4)
    lengths = 600 + np.arange(num_sequences) % BLOCK
    acquires = tuple(
        Acquire(int(i), random_tokens(rng, int(n))) for i, n in zip(ids(num_sequences), lengths, strict=True)
    )
    engine.call(acquires=acquires)
    engine.call(room=Room(ids(num_sequences), np.full(num_sequences, 4, np.int32)))
    for _ in range(num_steps):
        lengths += 1
        in_need = lengths % BLOCK == BLOCK - 2
        yield engine.request(
            advance=Advance(
                ids(num_sequences),
                np.ones(num_sequences, np.int32),
                random_tokens(rng, num_sequences),
                (lengths - 1).astype(np.int32),
            ),
            room=Room(ids(num_sequences)[in_need], np.full(int(in_need.sum()), 4, np.int32)),
        )


def advance_core_us() -> float:
    """Median of an update that advances 64 sequences, four of which seal a block and get a new one."""
    engine = Engine(65_536)
    return 1e6 * statistics.median(engine.timed(request) for request in decode_steps(engine, 64, 4000))


def bytes_per_block(num_blocks: int = 65_536) -> float:
    return Engine(num_blocks).manager.stats().bytes_of_state / num_blocks


def recovery_ops(num_steps: int = 4000, num_sequences: int = 64) -> float:
    """Per-sequence operations replayed per second when a manager starts from its journal."""
    with tempfile.TemporaryDirectory() as directory:
        journal = JournalConfig(Path(directory), fsync="never")
        engine = Engine(65_536, journal)
        for request in decode_steps(engine, num_sequences, num_steps):
            engine.manager.update_sequences(request)
        engine.manager.close()
        best = 0.0
        for _ in range(3):
            started = time.perf_counter()
            again = MemoryManager(MemoryConfig(journal=journal))
            best = max(best, num_steps * num_sequences / (time.perf_counter() - started))
            again.close()
    return best


def waste_share(num_streams: int = 16, num_tokens: int = 600) -> float:
    """Slots allocated but not used, of those allocated, while streams grow to 600 tokens."""
    engine = Engine(1024)
    num_prompt = 100
    acquires = tuple(Acquire(int(i), int32s(range(int(i), int(i) + num_prompt))) for i in ids(num_streams))
    engine.call(acquires=acquires)
    used = allocated = 0
    for length in range(num_prompt + 1, num_tokens + 1):
        room = Room(ids(num_streams), np.full(num_streams, 2, np.int32))
        engine.call(room=room)
        engine.call(advance=advance(num_streams, np.full(num_streams, length, np.int32), length - 1))
        stats = engine.manager.stats().engines[0]
        used += num_streams * length
        allocated += BLOCK * (stats.num_private + stats.num_ready)
    return 1 - used / allocated


def inspect_p99_ratio(num_steps: int = 3000) -> float:
    """p99 of an update while another thread reads all blocks 60 times a second, over p99 without."""

    def p99(engine: Engine) -> float:
        times = []
        for request in decode_steps(engine, 64, num_steps):
            times.append(engine.timed(request))
            time.sleep(0.0005)
        return statistics.quantiles(times, n=100)[98]

    def read(engine: Engine, stop: threading.Event) -> None:
        while not stop.wait(1 / 60):
            engine.manager.inspect_blocks()

    alone = p99(Engine(65_536))
    engine, stop = Engine(65_536), threading.Event()
    reader = threading.Thread(target=read, args=(engine, stop))
    reader.start()
    watched = p99(engine)
    stop.set()
    reader.join()
    return watched / alone


# name, function, unit, better, target
FIGURES: list[tuple[str, Callable[[], float], str, str, float]] = [
    ("memory.alloc_free", alloc_free, "blocks/s", "higher", 600e6),
    ("memory.match_64k", lambda: match(65_536), "blocks/s", "higher", 15e6),
    ("memory.match_1m", lambda: match(1 << 20), "blocks/s", "higher", 8e6),
    ("memory.seal", seal, "blocks/s", "higher", 5e6),
    ("memory.evict", evict, "blocks/s", "higher", 5e6),
    ("memory.rollback", rollback, "1/s", "higher", 10e6),
    ("memory.advance_core_us", advance_core_us, "us", "lower", 20),
    ("memory.bytes_per_block", bytes_per_block, "bytes", "lower", 160),
    ("memory.recovery_ops", recovery_ops, "1/s", "higher", 1e6),
    ("memory.waste_share", waste_share, "share", "lower", 0.03),
    ("memory.inspect_p99_ratio", inspect_p99_ratio, "ratio", "lower", 1.1),
    ("seed.allocator_65536", seed_allocator, "blocks/s", "higher", 52.6e6),
    ("seed.radix_100k", seed_radix, "1/s", "higher", 1.18e6),
]


def measure() -> list[dict[str, Any]]:
    """One entry per figure: name, value, unit, better, target, met."""
    MemoryManager(MemoryConfig()).warm_up()
    results = []
    for name, function, unit, better, target in FIGURES:
        value = function()
        met = value >= target if better == "higher" else value <= target
        results.append(
            {"name": name, "value": value, "unit": unit, "better": better, "target": target, "met": met}
        )
    return results


if __name__ == "__main__":
    for result in measure():
        print(f"{result['name']:28}{result['value']:16,.4g} {result['unit']:10}{result['target']:12,.4g}")
