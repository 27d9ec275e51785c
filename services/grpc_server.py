"""What every gRPC server and channel of the system has in common."""

from collections.abc import Sequence

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.config import ConfigError

MAX_MESSAGE_BYTES = 64 << 20

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]

SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Two servers on one port would share its connections silently.
    ("grpc.so_reuseport", 0),
]


class GrpcServer:
    """A grpc.aio server with health (NOT_SERVING until `set_serving`) and reflection."""

    def __init__(self, service_names: Sequence[str], max_request_bytes: int = MAX_MESSAGE_BYTES) -> None:
        limits = [("grpc.max_receive_message_length", max_request_bytes)]
        self.server = grpc.aio.server(options=[*SERVER_OPTIONS, *limits])
        self._names = [*service_names, ""]
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection(
            [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME], self.server
        )

    async def start(self, address: str) -> int:
        """Binds and starts; answers the port. Raises ConfigError when the address cannot be had."""
        await self.set_serving(False)
        try:
            port = self.server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {address}: is the port in use?") from error
        await self.server.start()
        return port

    async def set_serving(self, serving: bool) -> None:
        response = health_pb2.HealthCheckResponse
        for name in self._names:
            await self._health.set(name, response.SERVING if serving else response.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
