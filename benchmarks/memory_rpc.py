"""The memory manager in a process of its own, asked over loopback gRPC, with its journal."""

import statistics
import tempfile
import time
from typing import Any

import grpc
import numpy as np

from nexuskv.v1 import memory_pb2 as pb
from nexuskv.v1 import memory_pb2_grpc
from tests.services.memory_process import running_memory_manager

NUM_SEQUENCES, NUM_PROMPT, NUM_STEPS = 64, 600, 500


def advance_rpc_us() -> float:
    """Median time of a call that advances 64 sequences, as the engine's decode steps make it."""
    with (
        tempfile.TemporaryDirectory() as journal,
        running_memory_manager("--journal", journal) as address,
    ):
        return 1e6 * statistics.median(_times(address))


def _times(address: str) -> list[float]:
    rng = np.random.default_rng(6)
    ids = np.arange(1, NUM_SEQUENCES + 1)
    counts = np.ones(NUM_SEQUENCES, np.int32).tobytes()
    times = []
    with grpc.insecure_channel(address) as channel:
        stub = memory_pb2_grpc.MemoryManagerServiceStub(channel)
        register = pb.RegisterEngineRequest(
            engine_id="bench", num_blocks=65_536, block_size=16, model_fingerprint="model"
        )
        epoch = stub.RegisterEngine(register).epoch

        def request(op_seq: int, **lists: Any) -> pb.UpdateSequencesRequest:
            return pb.UpdateSequencesRequest(
                epoch=epoch, op_seq=op_seq, launched_step=op_seq, completed_step=op_seq, **lists
            )

        def tokens(num_tokens: int) -> bytes:
            return rng.integers(0, 50_000, num_tokens, np.int32).tobytes()

        acquires = [pb.Acquire(sequence_id=int(i), tokens=tokens(NUM_PROMPT), match_prefix=True) for i in ids]
        stub.UpdateSequences(request(1, acquires=acquires))
        ahead = np.full(NUM_SEQUENCES, NUM_STEPS, np.int32).tobytes()
        room = pb.Room(sequence_ids=ids.tobytes(), num_tokens_ahead=ahead)
        stub.UpdateSequences(request(2, room=room))
        for step in range(NUM_STEPS):
            written = np.full(NUM_SEQUENCES, NUM_PROMPT + step, np.int32).tobytes()
            advance = pb.Advance(
                sequence_ids=ids.tobytes(),
                num_tokens=counts,
                tokens=tokens(NUM_SEQUENCES),
                num_written=written,
            )
            update = request(3 + step, advance=advance)
            started = time.perf_counter()
            stub.UpdateSequences(update)
            times.append(time.perf_counter() - started)
    return times
