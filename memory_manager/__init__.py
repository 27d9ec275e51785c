"""The memory manager: who holds which block of which engine's KV pool, and which prefixes are cached.

A plain library without I/O of its own; one thread owns a MemoryManager. See docs in the modules:
`manager` (the façade), `requests` and `answers` (what it is told and what it says), `core` (how it works).
"""

from memory_manager.answers import (
    AcquireResult,
    AcquireStatus,
    AdvanceResult,
    ForkResult,
    RoomResult,
    UpdateAnswer,
)
from memory_manager.config import JournalConfig, MemoryConfig, TenantLimits
from memory_manager.core.ghosts import EvictionCause, MissReason
from memory_manager.errors import (
    ExhaustedError,
    InvalidRequestError,
    MemoryManagerError,
    NotFoundError,
    OutOfRangeError,
    PreconditionError,
)
from memory_manager.inspection import delta_between
from memory_manager.integrity import check_pool
from memory_manager.journal.file import JournalCorruptError, JournalUnavailableError
from memory_manager.journal.journal import repair_journal
from memory_manager.manager import MemoryManager
from memory_manager.requests import Acquire, Advance, Fork, Release, Room, Truncate, UpdateRequest
from memory_manager.views import (
    AllRemoved,
    BlockDelta,
    BlockSnapshot,
    Cleared,
    EngineMatch,
    EngineStats,
    Event,
    Explanation,
    Mended,
    Pin,
    Registration,
    Removed,
    Stats,
    Stored,
    TenantStats,
)

__all__ = [
    "Acquire",
    "AcquireResult",
    "AcquireStatus",
    "Advance",
    "AdvanceResult",
    "AllRemoved",
    "BlockDelta",
    "BlockSnapshot",
    "Cleared",
    "EngineMatch",
    "EngineStats",
    "Event",
    "EvictionCause",
    "ExhaustedError",
    "Explanation",
    "Fork",
    "ForkResult",
    "InvalidRequestError",
    "JournalConfig",
    "JournalCorruptError",
    "JournalUnavailableError",
    "MemoryConfig",
    "MemoryManager",
    "MemoryManagerError",
    "Mended",
    "MissReason",
    "NotFoundError",
    "OutOfRangeError",
    "Pin",
    "PreconditionError",
    "Registration",
    "Release",
    "Removed",
    "Room",
    "RoomResult",
    "Stats",
    "Stored",
    "TenantLimits",
    "TenantStats",
    "Truncate",
    "UpdateAnswer",
    "UpdateRequest",
    "check_pool",
    "delta_between",
    "repair_journal",
]
