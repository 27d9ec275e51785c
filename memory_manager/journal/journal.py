"""A directory with one journal file: a snapshot, then what has happened since."""

import fcntl
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from memory_manager.config import JournalConfig, MemoryConfig
from memory_manager.errors import InvalidRequestError, MemoryManagerError, PreconditionError
from memory_manager.journal.file import (
    DamagedRecordError,
    JournalCorruptError,
    JournalFile,
    JournalUnavailableError,
    read_records,
)
from memory_manager.journal.records import Kind, ReplayDifferenceError, replay_record
from memory_manager.journal.snapshot import decode_state, encode_state
from memory_manager.state import State

_DAMAGED = ".damaged"
_NAME = re.compile(r"journal-(\d{8})\.log")


class Recovered(NamedTuple):
    """What a file holds: the state, and how much of the file is whole."""

    state: State
    num_bytes: int
    snapshot_bytes: int


def recover(path: Path, config: MemoryConfig, now_us: int) -> Recovered:
    """Reads a journal file. A torn tail is left out. Raises JournalCorruptError."""
    state: State | None = None
    end = snapshot_bytes = 0
    try:
        for record in read_records(path):
            if state is None:
                state = decode_state(record.payload, config, now_us)
                snapshot_bytes = record.end
            else:
                replay_record(state, record.kind, record.payload)
            end = record.end
    except DamagedRecordError as damaged:
        raise JournalCorruptError(path, damaged.offset, str(damaged), snapshot_bytes > 0) from damaged
    except (ReplayDifferenceError, InvalidRequestError, PreconditionError, ValueError, KeyError) as error:
        what = f"a record that cannot be replayed ({error})"
        raise JournalCorruptError(path, end, what, snapshot_bytes > 0) from error
    if state is None:
        raise JournalCorruptError(path, end, "no snapshot", has_snapshot=False)
    return Recovered(state, end, snapshot_bytes)


class Journal:
    """The open journal of a running manager; holds a lock on its directory."""

    def __init__(self, config: JournalConfig, clock: Callable[[], float]) -> None:
        """Raises MemoryManagerError / JOURNAL_LOCKED when another process has it open."""
        self._config = config
        self._clock = clock
        self._last_sync = clock()
        self._is_synced = True
        config.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = os.open(config.directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise MemoryManagerError("JOURNAL_LOCKED", f"{config.directory} is in use") from error
        self._generation = 0
        self._rewrite_at = 0
        self._must_rewrite = False  # the state has changed in a way that no record tells
        self._file: JournalFile | None = None

    def load(self, config: MemoryConfig, now_us: int) -> State | None:
        """The state of the newest file, which is cut after its last whole record; None without a file."""
        generations = self._generations()
        if not generations:
            return None
        self._generation = generations[-1]
        try:
            recovered = recover(self._path(self._generation), config, now_us)
        except MemoryManagerError:
            self.close()
            raise
        self._file = JournalFile(self._path(self._generation), recovered.num_bytes)
        self._rewrite_at = self._threshold(recovered.snapshot_bytes)
        self._remove_all_but(self._generation)
        return recovered.state

    def append(self, kind: Kind, payload: bytes) -> None:
        if self._file is not None:
            self._file.append(kind, payload)

    def commit(self, state: State) -> None:
        """Gives what was appended to the operating system, and by policy to the disk.

        Rewrites the journal when it has grown. Raises JournalUnavailableError.
        """
        if self._file is None or self._must_rewrite:
            self.rewrite(state)
            return
        size = self._file.size
        self._file.commit()
        self._is_synced &= self._file.size == size
        self._sync_by_policy(self._file)
        if self._file.size > self._rewrite_at:
            self._rewrite_at = self._file.size + self._config.compact_bytes  # unless it succeeds
            with suppress(JournalUnavailableError):
                self.rewrite(state)

    def rewrite(self, state: State) -> None:
        """Starts a new file with a snapshot and removes the old ones. Raises JournalUnavailableError."""
        generation = self._generation + 1
        temporary = self._config.directory / "new"
        temporary.unlink(missing_ok=True)
        file = JournalFile(temporary)
        file.append(Kind.SNAPSHOT, encode_state(state))
        try:
            file.commit()
            file.sync()
        except JournalUnavailableError:
            file.close()
            raise
        os.rename(temporary, self._path(generation))
        self._sync_directory()
        if self._file is not None:
            self._file.close()
        self._file, self._generation, self._must_rewrite = file, generation, False
        self._rewrite_at = self._threshold(file.size)
        self._remove_all_but(generation)

    def restart(self, state: State) -> None:
        """Goes on from the state as it is. Raises JournalUnavailableError; then the next commit does it."""
        self._must_rewrite = True
        self.rewrite(state)

    def purge(self, state: State) -> None:
        """Leaves nothing on disk but what the state holds. Raises JournalUnavailableError."""
        self.restart(state)
        for path in self._config.directory.glob(f"*{_DAMAGED}"):
            path.unlink()

    @property
    def num_bytes(self) -> int:
        return self._file.size if self._file is not None else 0

    def close(self) -> None:
        if self._file is not None:
            self._file.sync()
            self._file.close()
            self._file = None
        os.close(self._lock)

    def _threshold(self, snapshot_bytes: int) -> int:
        return snapshot_bytes + max(self._config.compact_bytes, snapshot_bytes)

    def _sync_by_policy(self, file: JournalFile) -> None:
        if self._is_synced or self._config.fsync == "never":
            return
        now = self._clock()
        if self._config.fsync == "always" or now - self._last_sync >= self._config.fsync_interval_ms / 1000:
            file.sync()
            self._is_synced = True
            self._last_sync = now

    def _sync_directory(self) -> None:
        descriptor = os.open(self._config.directory, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def _path(self, generation: int) -> Path:
        return self._config.directory / f"journal-{generation:08}.log"

    def _generations(self) -> list[int]:
        names = (_NAME.fullmatch(path.name) for path in self._config.directory.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def _remove_all_but(self, generation: int) -> None:
        for other in self._generations():
            if other != generation:
                self._path(other).unlink()


def repair_journal(directory: Path) -> int:
    """Cuts the newest file before its first damaged record; answers how many bytes that costs.

    What it was stays beside it as `*.damaged`. Engines whose last calls are lost register anew.
    """
    path = max(directory.glob("journal-*.log"), default=None)
    if path is None:
        return 0
    try:
        recover(path, MemoryConfig(), now_us=0)
    except JournalCorruptError as corrupt:
        num_bytes = path.stat().st_size
        damaged = path.with_suffix(_DAMAGED)
        os.rename(path, damaged)
        if corrupt.has_snapshot:
            whole = damaged.read_bytes()[: corrupt.offset]
            path.touch(mode=0o600)
            path.write_bytes(whole)
            return num_bytes - corrupt.offset
        return num_bytes
    return 0
