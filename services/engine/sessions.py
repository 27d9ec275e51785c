"""One session per frontend: which requests are its own, and what is to be sent to it."""

import asyncio
from collections.abc import Iterable
from itertools import count

from engine.errors import QueueFullError, RequestError, TooLargeError
from engine.outputs import SequenceOutput
from nexuskv.v1 import engine_pb2 as pb
from services.engine.convert import output_to_pb, request_from_pb, step_to_pb
from services.engine.worker import EngineWorker

RETRY_AFTER_MS = 1000
_REJECTED = pb.Rejected


class FrontendSession:
    """Lives on the event loop. Responses queue up here; one message a step carries all its outputs."""

    def __init__(self, session_id: int, worker: EngineWorker) -> None:
        self._prefix = f"{session_id}/"
        self._worker = worker
        self._running: dict[str, int] = {}  # request id -> choices that have not ended
        self.responses: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()

    def submit(self, submit: pb.Submit, problem: str | None, draining: bool) -> None:
        """Queues a request with the engine, or rejects it; `problem` says what is wrong with it."""
        if draining:
            self._reject(submit.request_id, _REJECTED.REASON_DRAINING, "the engine is draining")
        elif problem is None and submit.request_id in self._running:
            self._reject(submit.request_id, _REJECTED.REASON_INVALID, "request_id is in use on this session")
        elif problem is not None:
            self._reject(submit.request_id, _REJECTED.REASON_INVALID, problem)
        else:
            self._running[submit.request_id] = submit.num_choices
            request = request_from_pb(submit, self._prefix + submit.request_id)
            self._worker.submit(request, lambda error: self._decided(submit.request_id, error))

    def abort(self, request_ids: Iterable[str]) -> None:
        self._worker.abort([self._prefix + request_id for request_id in request_ids])

    def abort_choices(self, choices: Iterable[pb.AbortSequences.Choice]) -> None:
        for choice in choices:
            self._worker.abort([self._prefix + choice.request_id], choice.index)

    def abort_all(self) -> None:
        self.abort(list(self._running))

    def close(self) -> None:
        """The frontend is gone: everything it asked for is aborted."""
        self.abort_all()
        self._running.clear()
        self.responses.put_nowait(None)

    def deliver(self, step: int, outputs: list[SequenceOutput], pool: pb.PoolState) -> None:
        mine = [self._own(output) for output in outputs if output.request_id.startswith(self._prefix)]
        if mine:
            self.responses.put_nowait(step_to_pb(step, mine, pool))

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _own(self, output: SequenceOutput) -> pb.SequenceOutput:
        request_id = output.request_id.removeprefix(self._prefix)
        if output.finish_reason is not None and request_id in self._running:
            self._running[request_id] -= 1
            if self._running[request_id] == 0:
                del self._running[request_id]
        return output_to_pb(output, request_id)

    def _decided(self, request_id: str, error: RequestError | None) -> None:
        if error is None:
            accepted = pb.Accepted(request_id=request_id)
            self.responses.put_nowait(pb.SessionResponse(accepted=accepted))
            return
        self._running.pop(request_id, None)
        reason = _REJECTED.REASON_INVALID
        if isinstance(error, QueueFullError):
            reason = _REJECTED.REASON_QUEUE_FULL
        elif isinstance(error, TooLargeError):
            reason = _REJECTED.REASON_TOO_LARGE
        self._reject(request_id, reason, str(error))

    def _reject(self, request_id: str, reason: pb.Rejected.Reason.ValueType, message: str) -> None:
        rejected = pb.Rejected(request_id=request_id, reason=reason, message=message)
        if reason == _REJECTED.REASON_QUEUE_FULL:
            rejected.retry_after_ms = RETRY_AFTER_MS
        self.responses.put_nowait(pb.SessionResponse(rejected=rejected))


class Sessions:
    """All sessions of one engine."""

    def __init__(self) -> None:
        self._sessions: set[FrontendSession] = set()
        self._ids = count(1)

    def open(self, worker: EngineWorker) -> FrontendSession:
        session = FrontendSession(next(self._ids), worker)
        self._sessions.add(session)
        return session

    def close(self, session: FrontendSession) -> None:
        self._sessions.discard(session)
        session.close()

    def deliver(self, step: int, outputs: list[SequenceOutput], pool: pb.PoolState) -> None:
        for session in self._sessions:
            session.deliver(step, outputs, pool)

    @property
    def num_running(self) -> int:
        return sum(session.num_running for session in self._sessions)

    def abort_all(self) -> int:
        """Aborts what still runs; answers how many requests that were."""
        num_aborted = self.num_running
        for session in self._sessions:
            session.abort_all()
        return num_aborted
