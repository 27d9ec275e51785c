"""Asks a peer's health service again and again; a peer that does not answer is not serving."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

INTERVAL_S = 1.0
DEADLINE_S = 2.0
# A peer this many probes behind is taken for dead though its connection stands.
LOST_AFTER_FAILURES = 3


class HealthProbe:
    def __init__(self, channel: grpc.aio.Channel, on_lost: Callable[[], None] | None = None) -> None:
        """`on_lost` is called once each time the peer has failed several probes in a row."""
        self._stub: Any = health_pb2_grpc.HealthStub(channel)
        self._on_lost = on_lost
        self._num_failures = 0
        self.is_serving = False

    async def run(self) -> None:
        while True:
            self.is_serving = await self._probe()
            await asyncio.sleep(INTERVAL_S)

    async def _probe(self) -> bool:
        try:
            answer = await self._stub.Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        except grpc.aio.AioRpcError:
            self._num_failures += 1
            if self._num_failures == LOST_AFTER_FAILURES and self._on_lost is not None:
                self._on_lost()
            return False
        self._num_failures = 0
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
