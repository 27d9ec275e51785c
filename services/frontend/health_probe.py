"""Asks a peer's health service again and again; a peer that does not answer is not serving."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

INTERVAL_S = 0.5
DEADLINE_S = 1.0
# One late answer on a busy machine means nothing; so many make a peer not ready, and then dead though its
# connection stands.
SILENT_AFTER, LOST_AFTER = 2, 6


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
        except grpc.aio.AioRpcError as error:
            self._num_failures += 1
            if self._num_failures == LOST_AFTER and self._on_lost is not None:
                self._on_lost()
            is_late = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            return self.is_serving and is_late and self._num_failures < SILENT_AFTER
        self._num_failures = 0
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
