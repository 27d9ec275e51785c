"""Load on the gRPC door: streams, whole answers, deadlines and clients that leave early."""

import random
import time
from collections.abc import Callable
from typing import Any

import grpc
import grpc.experimental.gevent
from locust import User, between, task

from nexuskv.v1 import inference_pb2 as pb
from nexuskv.v1 import inference_pb2_grpc

# locust's users are greenlets: without this the first call would block all of them.
grpc.experimental.gevent.init_gevent()

TOPICS = ("the sea", "paged memory", "a lighthouse", "prime numbers", "an old clock", "rain", "bread")


class GrpcClient(User):
    """`--host` is host:port of the gRPC door."""

    wait_time = between(0.05, 0.3)

    def on_start(self) -> None:
        self._channel = grpc.insecure_channel(self.host)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def on_stop(self) -> None:
        self._channel.close()

    @task(6)
    def stream(self) -> None:
        def run() -> int:
            messages = list(self._stub.StreamGenerate(_request(), timeout=60))
            reasons = [m.delta.finish_reason for m in messages if m.delta.finish_reason]
            if len(reasons) != 1 or not messages[-1].HasField("usage"):
                raise ValueError(f"{len(reasons)} finish reasons")
            return len(messages)

        self._timed("StreamGenerate", run)

    @task(3)
    def whole(self) -> None:
        self._timed("Generate", lambda: len(self._stub.Generate(_request(n=2), timeout=60).choices))

    @task(1)
    def leave_early(self) -> None:
        def run() -> int:
            call = self._stub.StreamGenerate(_request(max_tokens=200), timeout=60)
            next(call)
            call.cancel()
            return 1

        self._timed("leave early", run)

    @task(1)
    def deadline(self) -> None:
        """A deadline that passes is no failure of the server, as long as it says so."""

        def run() -> int:
            try:
                return len(self._stub.Generate(_request(max_tokens=400), timeout=0.2).choices)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
                return 0

        self._timed("deadline", run)

    @task(1)
    def watch(self) -> None:
        self._timed("GetServerInfo", lambda: self._stub.GetServerInfo(pb.GetServerInfoRequest()).ByteSize())

    def _timed(self, name: str, run: Callable[[], int]) -> None:
        started = time.perf_counter()
        problem: Exception | None = None
        length = 0
        try:
            length = run()
        except (grpc.RpcError, ValueError, StopIteration) as error:
            problem = error
        self.environment.events.request.fire(
            request_type="grpc",
            name=name,
            response_time=(time.perf_counter() - started) * 1e3,
            response_length=length,
            exception=problem,
            context={},
        )


def _request(**sampling: Any) -> pb.GenerateRequest:
    fields = {"max_tokens": random.randint(4, 32), **sampling}
    message = pb.ChatMessage(role="user", content=f"Tell me about {random.choice(TOPICS)}.")
    return pb.GenerateRequest(chat=pb.Chat(messages=[message]), sampling=pb.SamplingParams(**fields))
