"""A journal as a trace."""

from pathlib import Path

import numpy as np
import pytest

from memory_manager import JournalConfig, MemoryConfig, MemoryManager, TenantLimits
from memory_manager.replay import miss_ratio_curve, recorded_num_blocks, replay
from tests.memory_manager.engine_side import Clock, EngineSide


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests for a few dozen prompts, some much more often than others."""
    directory = tmp_path_factory.mktemp("trace")
    manager = MemoryManager(MemoryConfig(journal=JournalConfig(directory)), Clock())
    engine = EngineSide(num_blocks=64, manager=manager)
    rng = np.random.default_rng(0)
    for sequence_id in range(1, 400):
        number = int(rng.zipf(1.5)) % 40
        engine.acquire(sequence_id, range(1000 * number, 1000 * number + 70), tenant="ab"[number % 2])
        engine.write(sequence_id, 70)
        engine.room(sequence_id, 20)
        engine.advance(sequence_id, range(20), 89)
        engine.fork(sequence_id, 10_000 + sequence_id)
        engine.release(sequence_id, 10_000 + sequence_id)
    manager.close()
    (path,) = directory.glob("journal-*.log")
    return path


def test_the_same_pool_gives_the_same_hits(trace: Path) -> None:
    replayed = replay(trace, 64)
    assert replayed.num_acquires == 399
    assert (replayed.num_refused, replayed.num_preempted) == (0, 0)
    assert replayed.num_query_tokens == 399 * 70
    recorded = MemoryManager(MemoryConfig(journal=JournalConfig(trace.parent)), Clock())
    assert replayed.num_hit_tokens == recorded.stats().engines[0].num_hit_tokens
    assert replayed.num_evictions == recorded.stats().engines[0].num_evictions
    recorded.close()


def test_larger_pools_miss_less(trace: Path) -> None:
    curve = miss_ratio_curve(trace, [8, 32, 64, 400])
    ratios = [ratio for _, ratio in curve]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > ratios[-1] + 0.1


def test_too_small_a_pool_refuses_and_preempts(trace: Path) -> None:
    assert replay(trace, 4).num_refused == 399
    assert replay(trace, 5).num_preempted > 0


def test_other_rules(trace: Path) -> None:
    least_recently_used = replay(trace, 40)
    first_in_first_out = replay(trace, 40, MemoryConfig(eviction="fifo"))
    assert (least_recently_used.hit_rate or 0) > (first_in_first_out.hit_rate or 0)
    with_quota = replay(trace, 64, MemoryConfig(tenants={"a": TenantLimits(quota=8)}))
    assert (with_quota.hit_rate or 0) < (replay(trace, 64).hit_rate or 0)


def test_the_size_of_the_pool_is_in_the_journal(trace: Path, tmp_path: Path) -> None:
    assert recorded_num_blocks(trace) == 64
    directory = tmp_path / "journal"
    manager = MemoryManager(MemoryConfig(journal=JournalConfig(directory)), Clock())
    (empty,) = directory.glob("journal-*.log")
    assert recorded_num_blocks(empty) == 0
    manager.register_engine("engine", 48, 16, "model")
    manager.clear_cache()  # writes a snapshot
    (snapshot,) = directory.glob("journal-*.log")
    assert recorded_num_blocks(snapshot) == 48
