"""The engine's `MemoryClient` over gRPC."""

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import grpc

from engine.errors import MemoryManagerError, StaleEpochError
from engine.kv_pool import BLOCK_SIZE
from engine.memory_client import Update, UpdateAnswer
from nexuskv.v1 import memory_pb2, memory_pb2_grpc
from services.engine.memory_convert import answer_from_pb, update_to_pb
from services.errors import error_reason
from services.grpc_server import CHANNEL_OPTIONS

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
RETRY_S = 0.1
REFUSED_WAIT_S = 1.0
# The memory manager is gone, restarting or too busy: the same call is repeated until it answers.
_RETRIED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class GrpcMemoryClient:
    def __init__(self, address: str, engine_id: str) -> None:
        self._engine_id = engine_id
        self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._stub = memory_pb2_grpc.MemoryManagerServiceStub(self._channel)
        self._epoch = 0
        self._op_seq = 0
        self._epoch_ended = False
        self._request: memory_pb2.UpdateSequencesRequest | None = None
        self._call: Future[memory_pb2.UpdateSequencesResponse] | None = None
        # A thread that stays: gRPC's own futures start one for every call.
        self._caller = ThreadPoolExecutor(1, thread_name_prefix="memory")
        self._retry_at = 0.0
        self._closed = threading.Event()
        self._heartbeat_s = 2.0
        self._heartbeats: threading.Thread | None = None

    @property
    def epoch_ended(self) -> bool:
        return self._epoch_ended

    def register(self, num_blocks: int, model_fingerprint: str, timeout_s: float) -> bool:
        request = memory_pb2.RegisterEngineRequest(
            engine_id=self._engine_id,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            model_fingerprint=model_fingerprint,
        )
        try:
            response = self._stub.RegisterEngine(request, timeout=max(timeout_s, 1.0))
        except grpc.RpcError as error:
            if _code(error) in _RETRIED:
                self._closed.wait(timeout_s)
                return False
            self._closed.wait(REFUSED_WAIT_S)
            raise MemoryManagerError(f"the memory manager refused the engine: {error}") from error
        self._epoch, self._op_seq, self._epoch_ended = response.epoch, 0, False
        self._request = self._call = None
        self._heartbeat_s = response.heartbeat_interval_ms / 1e3
        if self._heartbeats is None:
            self._heartbeats = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._heartbeats.start()
        logger.info("registered %d blocks, epoch %d", num_blocks, self._epoch)
        return True

    def send(self, update: Update) -> None:
        self._op_seq += 1
        self._request = update_to_pb(update, self._epoch, self._op_seq)
        self._start()

    def receive(self, timeout_s: float) -> UpdateAnswer | None:
        if self._call is None:
            delay = self._retry_at - time.monotonic()
            if delay > 0:
                self._closed.wait(min(delay, timeout_s))
                return None
            self._start()
        assert self._call is not None
        if timeout_s <= 0 and not self._call.done():
            return None
        try:
            response = self._call.result(timeout=timeout_s or None)
        except TimeoutError:
            return None
        except grpc.RpcError as error:
            self._failed(error)
            return None
        self._request = self._call = None
        return answer_from_pb(response)

    def close(self) -> None:
        self._closed.set()
        if self._heartbeats is not None:
            self._heartbeats.join()
        self._channel.close()
        self._caller.shutdown()

    def _start(self) -> None:
        assert self._request is not None
        self._call = self._caller.submit(self._stub.UpdateSequences, self._request, timeout=CALL_TIMEOUT_S)

    def _failed(self, error: grpc.RpcError) -> None:
        """Plans the call's repetition, or raises what it means."""
        code = _code(error)
        if code in _RETRIED:
            self._call, self._retry_at = None, time.monotonic() + RETRY_S
            return
        self._epoch_ended = True
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            raise StaleEpochError(f"the memory manager has ended epoch {self._epoch}")
        assert isinstance(error, grpc.Call)
        raise MemoryManagerError(f"the memory manager refused a call ({error_reason(error)}): {error}")

    def _beat(self) -> None:
        """Renews the lease. The epoch's end is noted; the engine's thread registers again."""
        while not self._closed.wait(self._heartbeat_s):
            epoch = self._epoch
            try:
                self._stub.Heartbeat(memory_pb2.HeartbeatRequest(epoch=epoch), timeout=self._heartbeat_s)
            except grpc.RpcError as error:
                if _code(error) is grpc.StatusCode.FAILED_PRECONDITION and epoch == self._epoch:
                    self._epoch_ended = True


def _code(error: grpc.RpcError) -> grpc.StatusCode:
    assert isinstance(error, grpc.Call)
    code: grpc.StatusCode = error.code()
    return code
