"""Workloads of the memory manager as an engine's decode steps make them, with all checks on."""

import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.memory_workloads import BLOCK, Engine, advance, ids, int32s, random_tokens
from memory_manager import (
    Acquire,
    Advance,
    JournalConfig,
    MemoryConfig,
    MemoryManager,
    Release,
    Room,
    UpdateRequest,
)


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


def advance_core_us(num_rounds: int = 12, num_steps: int = 400) -> float:
    """Median of an update that advances 64 sequences, four of which seal a block and get a new one.

    Of the best round, for the sake of machines that do other things too.
    """
    engine = Engine(65_536)
    requests = list(decode_steps(engine, 64, num_rounds * num_steps))
    rounds = [requests[i : i + num_steps] for i in range(0, len(requests), num_steps)]
    return 1e6 * min(statistics.median(map(engine.timed, batch)) for batch in rounds)


def advance_drafts_us(num_sequences: int = 64, num_rounds: int = 12, num_steps: int = 100) -> float:
    """Median of an update in which 64 sequences advance and are each offered 64 draft tokens."""
    num_offered = 64
    first = num_offered + 8  # tokens of a sequence before it advances
    engine = Engine(65_536)
    rng = np.random.default_rng(5)
    told = [random_tokens(rng, 2048) for _ in ids(num_sequences)]
    for text in told:
        engine.call(acquires=(Acquire(1, text),))
        engine.call(release=Release(np.array([1])))
    # The first token differs, so that nothing is shared.
    acquires = (
        Acquire(int(i), np.append(int32s([i]), t[1:first]))
        for i, t in zip(ids(num_sequences), told, strict=True)
    )
    engine.call(acquires=tuple(acquires))
    engine.call(room=Room(ids(num_sequences), np.full(num_sequences, 2048, np.int32)))
    wanted = np.full(num_sequences, num_offered, np.int32)
    medians = []
    for start in range(first, first + num_rounds * num_steps, num_steps):
        times = []
        for i in range(start, start + num_steps):
            tokens = int32s([text[i] for text in told])
            step = advance(num_sequences, tokens, i)._replace(num_drafts=wanted)
            request = engine.request(advance=step)
            times.append(engine.timed(request))
        medians.append(statistics.median(times))
    answer = engine.manager.update_sequences(request)
    assert answer.advance.draft_tokens.size == num_offered * num_sequences
    return 1e6 * min(medians)


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


def inspect_p99_ratio(num_rounds: int = 7, num_steps: int = 600) -> float:
    """p99 of an update while another thread reads all blocks 60 times a second, over p99 without.

    The two take turns; the answer is the median over the rounds.
    """
    engine = Engine(65_536)
    requests = decode_steps(engine, 64, 2 * num_rounds * num_steps)

    def p99() -> float:
        times = []
        for request in itertools.islice(requests, num_steps):
            times.append(engine.timed(request))
            time.sleep(0.0005)
        return statistics.quantiles(times, n=100)[98]

    def read(stop: threading.Event) -> None:
        while not stop.wait(1 / 60):
            engine.manager.inspect_blocks()

    ratios = []
    for _ in range(num_rounds):
        alone = p99()
        stop = threading.Event()
        reader = threading.Thread(target=read, args=(stop,))
        reader.start()
        ratios.append(p99() / alone)
        stop.set()
        reader.join()
    return statistics.median(ratios)
