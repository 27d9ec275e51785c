"""Journals that were torn, damaged or could not be written."""

import asyncio
import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from memory_manager import (
    AcquireStatus,
    JournalConfig,
    JournalCorruptError,
    JournalUnavailableError,
    MemoryConfig,
    MemoryManager,
    PreconditionError,
    repair_journal,
)
from memory_manager.journal.file import read_records
from memory_manager.journal.records import Kind
from services.memory import process
from tests.memory_manager.engine_side import Clock, EngineSide, int32s
from tests.memory_manager.journals import assert_same_state, killed_copy, newest, open_at


def test_a_journal_cut_at_every_byte_of_its_last_records_is_one_of_its_past_states(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    engine = EngineSide(num_blocks=8, manager=open_at(directory))
    states = []
    steps: list[Callable[[], object]] = [
        lambda: engine.acquire(1, range(40), tenant="c"),
        lambda: engine.write(1, 40),
        lambda: engine.manager.pin_prefix("engine", "c", "", "", int32s(range(40)), 1000),
        lambda: engine.release(1),
        lambda: engine.manager.unpin_prefix(1),
    ]
    for step in steps:
        states.append((newest(directory).stat().st_size, engine.manager.inspect_blocks().states.tolist()))
        step()
    data = newest(directory).read_bytes()
    states.append((len(data), engine.manager.inspect_blocks().states.tolist()))
    cut = tmp_path / "cut"
    for length in range(states[0][0], len(data) + 1):
        shutil.rmtree(cut, ignore_errors=True)
        cut.mkdir()
        (cut / newest(directory).name).write_bytes(data[:length])
        manager = open_at(cut)
        expected = [blocks for size, blocks in states if size <= length][-1]
        assert manager.inspect_blocks().states.tolist() == expected
        assert newest(cut).stat().st_size == max(size for size, _ in states if size <= length)
        manager.close()


@pytest.mark.parametrize("place", ["head", "payload"])
def test_a_corrupt_middle_is_refused_and_can_be_repaired(tmp_path: Path, place: str) -> None:
    directory = tmp_path / "journal"
    engine = EngineSide(manager=open_at(directory))
    for i in range(1, 6):
        engine.acquire(i, range(100 * i, 100 * i + 50), tenant="c")
    engine.manager.close()
    records = list(read_records(newest(directory)))
    offset = records[-4].end
    data = bytearray(newest(directory).read_bytes())
    data[offset + (8 if place == "head" else 60)] ^= 0x40
    newest(directory).write_bytes(data)
    with pytest.raises(JournalCorruptError) as refused:
        open_at(directory)
    assert refused.value.offset == offset
    assert str(offset) in str(refused.value)
    assert repair_journal(directory) == len(data) - offset
    again = open_at(directory)
    assert again.stats().engines[0].num_sequences == 2
    assert again.check_integrity() == []
    engine.manager = again
    with pytest.raises(PreconditionError):
        engine.acquire(6, range(10))


def test_a_record_that_cannot_be_replayed_is_refused_and_can_be_cut(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    engine = EngineSide(manager=open_at(directory))
    engine.acquire(1, range(50), tenant="c")
    engine.manager._record(Kind.END_EPOCH, {"epoch": 1234})
    engine.acquire(2, range(50), tenant="c")
    engine.manager.close()
    with pytest.raises(JournalCorruptError, match="cannot be replayed"):
        open_at(directory)
    assert repair_journal(directory) > 0
    assert repair_journal(directory) == 0
    assert open_at(directory).stats().engines[0].num_sequences == 1


@pytest.mark.parametrize("offset", [0, 30])
def test_without_a_whole_snapshot_repair_starts_anew(tmp_path: Path, offset: int) -> None:
    directory = tmp_path / "journal"
    engine = EngineSide(manager=open_at(directory))
    engine.acquire(1, range(50), tenant="c")
    engine.manager.close()
    data = bytearray(newest(directory).read_bytes())
    data[offset] ^= 1
    newest(directory).write_bytes(data)
    with pytest.raises(JournalCorruptError):
        open_at(directory)
    assert repair_journal(directory) == len(data)
    manager = open_at(directory)
    assert manager.stats().engines == ()
    assert list(directory.glob("*.damaged"))
    manager.clear_cache()
    assert not list(directory.glob("*.damaged"))


def test_there_may_be_nothing_to_repair(tmp_path: Path) -> None:
    assert repair_journal(tmp_path) == 0


@contextlib.contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def full(descriptor: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("memory_manager.journal.file.os.write", full)
        yield


def test_what_was_cleared_on_a_full_disk_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "journal"
    engine = EngineSide(num_blocks=8, manager=open_at(directory))
    engine.finish(1, range(64))
    with full_disk(monkeypatch), pytest.raises(JournalUnavailableError):
        engine.manager.clear_cache()
    assert engine.num_cached(range(64)) == 0
    assert engine.acquire(2, range(64)).num_cached == 0
    again = open_at(killed_copy(directory, tmp_path / "copy"))
    assert_same_state(engine.manager, again)


async def test_the_reaper_outlives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "REAP_INTERVAL_S", 0.01)
    clock = Clock()
    config = MemoryConfig(lease_ms=1000, journal=JournalConfig(tmp_path / "journal"))
    manager = MemoryManager(config, clock)
    manager.register_engine("engine", 8, 16, "model")
    reaper = asyncio.create_task(process._reap(manager))
    with full_disk(monkeypatch):
        clock.now += 2
        await asyncio.sleep(0.1)
    assert any("leases:" in message for message in caplog.messages)
    epoch = manager.register_engine("other", 8, 16, "model").epoch
    clock.now += 2
    await asyncio.sleep(0.1)
    with pytest.raises(PreconditionError):
        manager.heartbeat(epoch)
    reaper.cancel()


def test_a_full_disk_keeps_the_answer_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "journal"
    engine = EngineSide(num_blocks=8, manager=open_at(directory))
    with full_disk(monkeypatch), pytest.raises(JournalUnavailableError):
        engine.acquire(1, range(40), tenant="c")
    assert engine.acquire(1, range(40), tenant="c").status is AcquireStatus.GRANTED
    assert_same_state(engine.manager, open_at(killed_copy(directory, tmp_path / "copy")))
