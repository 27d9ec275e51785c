"""The memory manager process."""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from memory_manager import JournalConfig, JournalCorruptError, MemoryConfig, MemoryManager, repair_journal
from memory_manager.errors import MemoryManagerError
from nexuskv.v1 import memory_pb2_grpc
from services.config import MemoryManagerConfig
from services.grpc_server import GrpcServer
from services.memory.servicer import MemoryServicer
from services.memory.tenants import read_tenant_limits
from services.signals import wait_for_signal
from services.startup import StartError

logger = logging.getLogger(__name__)

SERVICE_NAME = "nexuskv.v1.MemoryManagerService"
# Engines send a heartbeat this many times in a lease.
HEARTBEATS_PER_LEASE = 5
REAP_INTERVAL_S = 0.5
_FSYNC: dict[str, Literal["always", "interval", "never"]] = {
    "always": "always",
    "interval": "interval",
    "never": "never",
}


async def run_memory_manager(config: MemoryManagerConfig, on_ready: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT. `on_ready` hears the address."""
    manager = _open(config)
    manager.warm_up()
    server = GrpcServer([SERVICE_NAME])
    memory_pb2_grpc.add_MemoryManagerServiceServicer_to_server(MemoryServicer(manager), server.server)
    port = await server.start(config.memory_listen)
    await server.set_serving(True)
    on_ready(f"{config.memory_listen.rpartition(':')[0]}:{port}")
    reaper = asyncio.create_task(_reap(manager))
    await wait_for_signal()
    reaper.cancel()
    await server.stop(1.0)
    manager.close()


def _open(config: MemoryManagerConfig) -> MemoryManager:
    """Comes up as the journal says. Raises StartError."""
    directory = journal_directory(config.journal)
    try:
        if directory is not None and config.journal_repair:
            logger.warning("%d bytes of the journal were cut", repair_journal(directory))
        return MemoryManager(
            MemoryConfig(
                lease_ms=config.lease_ms,
                heartbeat_interval_ms=max(1, config.lease_ms // HEARTBEATS_PER_LEASE),
                tenants=read_tenant_limits(config.tenant_limits),
                draft_index_tokens=config.draft_index_tokens,
                journal=None if directory is None else JournalConfig(directory, _FSYNC[config.fsync]),
            )
        )
    except JournalCorruptError as error:
        raise StartError(f"{error}; --journal-repair cuts it there, --journal DIR starts anew") from error
    except (MemoryManagerError, OSError) as error:
        raise StartError(f"{error}; give --journal DIR or --journal off") from error


def journal_directory(option: str) -> Path | None:
    if option == "off":
        return None
    if option != "auto":
        return Path(option).expanduser()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "nexuskv" / "journal"


async def _reap(manager: MemoryManager) -> None:
    """Ends the leases of engines that have gone silent; one call takes microseconds."""
    while True:
        await asyncio.sleep(REAP_INTERVAL_S)
        try:
            for epoch in manager.reap_expired():
                logger.warning("the lease of epoch %d is over; its blocks are free", epoch)
        except MemoryManagerError as error:
            logger.warning("leases: %s", error)
