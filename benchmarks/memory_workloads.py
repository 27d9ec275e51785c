"""Workloads of the memory manager, through the entry points that the RPCs use, with all checks on.

Throughputs are the best of several rounds, latencies medians.
"""

import gc
import statistics
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

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
from memory_manager.core.handle import open_pool
from memory_manager.core.hashing import chain_paths
from memory_manager.core.layout import Array, Pool
from memory_manager.core.trie import match

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
        """Seconds that the call took, without Python's garbage collector."""
        gc.disable()
        started = time.perf_counter()
        self.manager.update_sequences(request)
        seconds = time.perf_counter() - started
        gc.enable()
        return seconds


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


def match_prompts(num_blocks: int) -> float:
    """Blocks matched per second on a trie of so many blocks."""
    engine, prompts = filled(num_blocks)
    order = np.random.default_rng(1).integers(0, len(prompts), 1024)
    best = 0.0
    for start in range(0, len(order), 16):
        chosen = [prompts[i] for i in order[start : start + 16]]
        started = time.perf_counter()
        found = [engine.manager.lookup_prefix(MODEL, "", "", prompt)[0].num_cached for prompt in chosen]
        seconds = time.perf_counter() - started
        best = max(best, sum(found) / BLOCK / seconds)
    return best


def lookup_us(num_lookups: int = 5_000) -> float:
    """Median time of one lookup of a prompt of a single cached block."""
    engine, prompts = filled(20_480, prompt_blocks=1)
    times = []
    for i in range(num_lookups):
        prompt = np.append(prompts[i % len(prompts)], int32s([1]))
        started = time.perf_counter()
        engine.manager.lookup_prefix(MODEL, "", "", prompt)
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def seed_radix(num_lookups: int = 100_000) -> float:
    """100,000 lookups per second, one block each, a fifth of which hit.

    As in the library it is compared with, they are looked up one after the other inside compiled code, by
    the function that lookups and acquires use; `lookup_us` is what one call from outside takes.
    """
    rng = np.random.default_rng(2)
    engine, prompts = filled(20_480, prompt_blocks=1)
    chunks = np.stack(
        [prompts[i // 5] if i % 5 == 0 else random_tokens(rng, BLOCK) for i in range(num_lookups)]
    )
    (pool,) = engine.manager._state.engines.values()
    assert _look_up_all(pool.tables.arrays, chunks[:5].reshape(-1)) == 1  # compiles
    started = time.perf_counter()
    num_hits = _look_up_all(pool.tables.arrays, chunks.reshape(-1))
    seconds = time.perf_counter() - started
    assert num_hits == num_lookups // 5
    return num_lookups / seconds


@njit  # type: ignore[untyped-decorator]
def _look_up_all(arrays: Array, chunks: Int32s) -> int:
    """How many of the chunks (int32[16 n]) are cached below the first namespace's root."""
    pool: Pool = open_pool(arrays)
    paths = np.empty(1, np.uint64)
    blocks = np.empty(1, np.int32)
    num_hits = 0
    for start in range(0, chunks.size, BLOCK):
        tokens = chunks[start : start + BLOCK]
        chain_paths(pool, 0, tokens, paths)
        num_hits += match(pool, 0, tokens, paths, 1, blocks)
    return num_hits


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


def bytes_per_block(num_blocks: int = 65_536) -> float:
    return Engine(num_blocks).manager.stats().bytes_of_state / num_blocks
