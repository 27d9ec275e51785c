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
from memory_manager.config import MemoryConfig, TenantLimits
from memory_manager.errors import (
    ExhaustedError,
    InvalidRequestError,
    MemoryManagerError,
    NotFoundError,
    OutOfRangeError,
    PreconditionError,
)
from memory_manager.manager import MemoryManager
from memory_manager.requests import Acquire, Advance, Fork, Release, Room, Truncate, UpdateRequest
from memory_manager.views import (
    BlockSnapshot,
    Cleared,
    EngineMatch,
    EngineStats,
    Pin,
    Registration,
    Stats,
    TenantStats,
)

__all__ = [
    "Acquire",
    "AcquireResult",
    "AcquireStatus",
    "Advance",
    "AdvanceResult",
    "BlockSnapshot",
    "Cleared",
    "EngineMatch",
    "EngineStats",
    "ExhaustedError",
    "Fork",
    "ForkResult",
    "InvalidRequestError",
    "MemoryConfig",
    "MemoryManager",
    "MemoryManagerError",
    "NotFoundError",
    "OutOfRangeError",
    "Pin",
    "PreconditionError",
    "Registration",
    "Release",
    "Room",
    "RoomResult",
    "Stats",
    "TenantLimits",
    "TenantStats",
    "Truncate",
    "UpdateAnswer",
    "UpdateRequest",
]
