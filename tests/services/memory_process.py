"""A memory manager in a process of its own, and an engine's side of it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import grpc

from engine.memory_client import Acquire, Advance, Update
from nexuskv.v1 import memory_pb2, memory_pb2_grpc
from services.engine.memory_convert import update_to_pb

NUM_BLOCKS = 8


@contextlib.contextmanager
def running_memory_manager(*options: str, **environment: str) -> Iterator[str]:
    """Its address."""
    command = [sys.executable, "-m", "services.cli", "memory-manager", "--memory-listen", "127.0.0.1:0"]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )
    assert process.stdout is not None
    try:
        ready = re.fullmatch(r"ready memory=(\S+)\n", process.stdout.readline())
        assert ready
        yield ready[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.stdout.close()
        assert process.wait(30) == 0


def serve_requests(address: str) -> None:
    """A handful of requests; one is left."""
    with grpc.insecure_channel(address) as channel:
        stub = memory_pb2_grpc.MemoryManagerServiceStub(channel)
        registered = stub.RegisterEngine(
            memory_pb2.RegisterEngineRequest(
                engine_id="engine-7", num_blocks=NUM_BLOCKS, block_size=16, model_fingerprint="model"
            )
        )
        op_seq = 0

        def call(update: Update) -> None:
            nonlocal op_seq
            op_seq += 1
            stub.UpdateSequences(update_to_pb(update, registered.epoch, op_seq))

        def serve(sequence_id: int, tenant: str, tokens: list[int]) -> None:
            call(Update(acquires=[Acquire(sequence_id, tenant, "", "", 0, tokens, match_prefix=True)]))
            call(Update(advances=[Advance(sequence_id, [], len(tokens))], releases=[sequence_id]))

        serve(1, "ann", [*range(64)])
        serve(2, "ann", [*range(64)])
        serve(3, "bob", [*range(900, 1028)])  # takes every block
        serve(4, "ann", [*range(64)])
        call(Update(acquires=[Acquire(5, "ann", "", "", 0, [*range(10)], match_prefix=True)]))
