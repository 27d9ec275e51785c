"""What engine and memory manager say about themselves, asked when somebody wants to know."""

import asyncio
from typing import NamedTuple

import grpc.aio

from nexuskv.v1 import engine_pb2, engine_pb2_grpc, memory_pb2, memory_pb2_grpc

DEADLINE_S = 1.0


class Snapshot(NamedTuple):
    """None for a peer that did not answer in time."""

    load: engine_pb2.GetLoadResponse | None
    memory: memory_pb2.GetStatsResponse | None


class PeerStats:
    def __init__(
        self,
        engine: "engine_pb2_grpc.EngineServiceAsyncStub",
        memory: "memory_pb2_grpc.MemoryManagerServiceAsyncStub",
    ) -> None:
        self._engine = engine
        self._memory = memory

    async def snapshot(self) -> Snapshot:
        load, memory = await asyncio.gather(self._load(), self._stats())
        return Snapshot(load, memory)

    async def _load(self) -> engine_pb2.GetLoadResponse | None:
        try:
            return await self._engine.GetLoad(engine_pb2.GetLoadRequest(), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError:
            return None

    async def _stats(self) -> memory_pb2.GetStatsResponse | None:
        try:
            return await self._memory.GetStats(memory_pb2.GetStatsRequest(), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError:
            return None
