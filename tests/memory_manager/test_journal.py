"""The journal: a manager that was killed comes back exactly as it was, or says where it cannot."""

import stat
from dataclasses import replace
from pathlib import Path

import pytest

from memory_manager import (
    Acquire,
    AcquireStatus,
    Advance,
    JournalConfig,
    MemoryConfig,
    MemoryManager,
    MemoryManagerError,
    PreconditionError,
    Release,
    TenantLimits,
    UpdateRequest,
)
from memory_manager.codec import encode_answer
from memory_manager.journal.file import read_records
from tests.memory_manager.engine_side import Clock, EngineSide, int32s, int64s
from tests.memory_manager.journals import assert_same_state, killed_copy, newest, open_at, random_life
from tests.memory_manager.random_calls import MIXES, RandomCalls
from tests.memory_manager.side_by_side import to_answer, to_request


@pytest.mark.parametrize("seed", range(6))
def test_a_killed_manager_comes_back_as_it_was(tmp_path: Path, seed: int) -> None:
    both = random_life(tmp_path / "journal", seed)
    again = open_at(killed_copy(tmp_path / "journal", tmp_path / "copy"))
    assert_same_state(both.manager, again)
    first = both.manager
    calls = RandomCalls(both, seed + 100, ["a", "b", "c"], [("", ""), ("salt", "")])
    calls.last_id = 10**6
    for _ in range(30):
        call = calls.next_call(MIXES[0])
        answer = both.update(call)
        if answer is not None:
            assert to_answer(again.update_sequences(to_request(call, both.epoch, both.op_seq))) == answer
    assert first.check_integrity() == again.check_integrity() == []


def test_the_last_call_is_answered_again_after_a_restart(tmp_path: Path) -> None:
    engine = EngineSide(manager=open_at(tmp_path / "journal"))
    engine.acquire(1, range(100), tenant="c")
    request = UpdateRequest(engine.epoch, 2, acquires=(Acquire(2, int32s(range(50)), "c"),))
    answer = engine.manager.update_sequences(request)
    for name in ("tail", "snapshot"):
        again = open_at(killed_copy(tmp_path / "journal", tmp_path / name))
        assert encode_answer(again.update_sequences(request)) == encode_answer(answer)
        with pytest.raises(MemoryManagerError, match="another body"):
            again.update_sequences(request._replace(launched_step=1))
        with pytest.raises(PreconditionError, match="next one is 3"):
            again.update_sequences(request._replace(op_seq=4))
        assert again.update_sequences(UpdateRequest(engine.epoch, 3, release=Release(int64s([2])))).num_free
        engine.manager.clear_cache(salt="nobody's")  # writes a snapshot


def test_what_watchers_are_told_is_not_journaled(tmp_path: Path) -> None:
    """A snapshot that was written while somebody watched is replayed by a manager that nobody watches."""
    engine = EngineSide(num_blocks=8, manager=open_at(tmp_path / "journal"))
    engine.manager.events(0)
    engine.manager.clear_cache()
    for i in range(1, 40):
        engine.finish(i, range(100 * i, 100 * i + 100))
    again = open_at(killed_copy(tmp_path / "journal", tmp_path / "copy"))
    assert again.check_integrity() == []
    seen, seen_again = ([event.change for event in side.events(0)] for side in (engine.manager, again))
    assert len(seen_again) > 1
    assert list(map(repr, seen)) == list(map(repr, seen_again))


def test_new_epochs_are_never_old_ones(tmp_path: Path) -> None:
    manager = open_at(tmp_path / "journal")
    first = manager.register_engine("e", 8, 16, "m").epoch
    lost = manager.register_engine("f", 8, 16, "m").epoch
    manager.close()
    records = list(read_records(newest(tmp_path / "journal")))
    with newest(tmp_path / "journal").open("r+b") as file:
        file.truncate(records[-2].end)
    again = open_at(tmp_path / "journal")
    assert again.register_engine("g", 8, 16, "m").epoch not in (first, lost)
    again.heartbeat(first)
    with pytest.raises(PreconditionError):
        again.heartbeat(lost)


def test_nothing_that_was_cleared_stays_on_disk(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    engine = EngineSide(manager=open_at(directory))
    secret = int32s(range(7000, 7064))
    engine.finish(1, range(7000, 7064), tenant="c")
    assert secret.tobytes() in newest(directory).read_bytes()
    engine.manager.clear_cache()
    files = [path.read_bytes() for path in directory.iterdir()]
    assert not any(secret[i : i + 4].tobytes() in data for data in files for i in range(0, 64, 4))


def test_drafts_of_what_was_cleared_stay_nowhere(tmp_path: Path) -> None:
    """The answer to the last call is kept for its repeat; it must not keep the drafts."""
    directory = tmp_path / "journal"
    engine = EngineSide(manager=open_at(directory))
    engine.acquire(1, range(7000, 7064))
    engine.release(1)
    engine.acquire(2, [*range(7000, 7004)], salt="")
    advance = Advance(int64s([2]), int32s([0]), int32s([]), int32s([4]), int32s([64]))
    answer = engine.call(advance=advance)
    assert answer.advance.draft_tokens.tolist() == [7004, 7005, 7006, 7007]
    repeat = UpdateRequest(engine.epoch, engine.op_seq, advance=advance)
    assert engine.manager.update_sequences(repeat) is answer
    engine.manager.clear_cache()
    data = newest(directory).read_bytes()
    assert int32s([7004, 7005]).tobytes() not in data
    assert int32s([7004, 7005]).tobytes().hex().encode() not in data
    assert engine.manager.update_sequences(repeat).advance.draft_tokens.size == 0


def test_only_its_owner_can_read_it(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    engine = EngineSide(manager=open_at(directory))
    engine.manager.clear_cache()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}


def test_two_managers_cannot_share_it(tmp_path: Path) -> None:
    first = open_at(tmp_path / "journal")
    with pytest.raises(MemoryManagerError) as refused:
        open_at(tmp_path / "journal")
    assert refused.value.reason == "JOURNAL_LOCKED"
    first.close()
    open_at(tmp_path / "journal").close()


def test_it_is_rewritten_when_it_has_grown(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    engine = EngineSide(num_blocks=8, manager=open_at(directory, compact_bytes=4096))
    for i in range(1, 400):
        engine.finish(i, range(20), tenant="c")
    assert newest(directory).name > "journal-00000002.log"
    assert len(list(directory.glob("journal-*"))) == 1
    assert newest(directory).stat().st_size < 100_000
    assert_same_state(engine.manager, open_at(killed_copy(directory, tmp_path / "copy")))


def test_settings_that_changed_hold_from_now_on(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    engine = EngineSide(manager=open_at(directory))
    engine.finish(1, range(64), tenant="a")
    engine.manager.close()
    config = MemoryConfig(tenants={"a": TenantLimits(quota=2)}, journal=JournalConfig(directory))
    engine.manager = MemoryManager(config, Clock())
    result = engine.acquire(2, range(100, 200), tenant="a")
    assert (result.status, result.num_limit) == (AcquireStatus.NEVER, 2)
    copy = JournalConfig(killed_copy(directory, tmp_path / "copy"))
    assert_same_state(engine.manager, MemoryManager(replace(config, journal=copy), Clock()))


def test_one_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("memory_manager.journal.snapshot._LAYOUT", "another")
        open_at(tmp_path / "journal").close()
    with pytest.raises(MemoryManagerError, match="another version"):
        open_at(tmp_path / "journal")


def test_leases_start_again(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    engine = EngineSide(manager=open_at(directory))
    clock = Clock()
    clock.now += 10**6
    config = MemoryConfig(journal=JournalConfig(killed_copy(directory, tmp_path / "copy")))
    again = MemoryManager(config, clock)
    assert again.reap_expired() == []
    clock.now += 11
    assert again.reap_expired() == [engine.epoch]


def test_without_a_journal_nothing_survives() -> None:
    manager = MemoryManager(MemoryConfig(), Clock())
    epoch = manager.register_engine("e", 8, 16, "m").epoch
    with pytest.raises(PreconditionError):
        MemoryManager(MemoryConfig(), Clock()).heartbeat(epoch)


def test_with_group_commit_nothing_is_written_before_commit(tmp_path: Path) -> None:
    directory = tmp_path / "journal"
    manager = open_at(directory, group_commit=True)
    manager.commit()
    size = newest(directory).stat().st_size
    engine = EngineSide(num_blocks=8, manager=manager)
    engine.acquire(1, range(40), tenant="c")
    assert newest(directory).stat().st_size == size
    manager.commit()
    assert_same_state(manager, open_at(killed_copy(directory, tmp_path / "copy")))


@pytest.mark.parametrize("fsync", ["always", "interval", "never"])
def test_every_fsync_policy_writes_the_same(tmp_path: Path, fsync: str) -> None:
    engine = EngineSide(num_blocks=8, manager=open_at(tmp_path / "journal", fsync=fsync))
    engine.finish(1, range(40), tenant="c")
    assert_same_state(engine.manager, open_at(killed_copy(tmp_path / "journal", tmp_path / "copy")))
