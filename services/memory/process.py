"""The memory manager process."""

import asyncio
import logging
from collections.abc import Callable

from memory_manager import MemoryConfig, MemoryManager
from nexuskv.v1 import memory_pb2_grpc
from services.config import MemoryManagerConfig
from services.grpc_server import GrpcServer
from services.memory.servicer import MemoryServicer
from services.signals import wait_for_signal

logger = logging.getLogger(__name__)

SERVICE_NAME = "nexuskv.v1.MemoryManagerService"
# Engines send a heartbeat this many times in a lease.
HEARTBEATS_PER_LEASE = 5
REAP_INTERVAL_S = 0.5


async def run_memory_manager(config: MemoryManagerConfig, on_ready: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT. `on_ready` hears the address."""
    manager = MemoryManager(
        MemoryConfig(
            lease_ms=config.lease_ms, heartbeat_interval_ms=max(1, config.lease_ms // HEARTBEATS_PER_LEASE)
        )
    )
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


async def _reap(manager: MemoryManager) -> None:
    """Ends the leases of engines that have gone silent; one call takes microseconds."""
    while True:
        await asyncio.sleep(REAP_INTERVAL_S)
        for epoch in manager.reap_expired():
            logger.warning("the lease of epoch %d is over; its blocks are free", epoch)
