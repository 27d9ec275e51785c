"""The frontend's one session with the engine: submit and abort out, step outputs in."""

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress
from dataclasses import replace

import grpc
import grpc.aio

from nexuskv.v1 import engine_pb2, engine_pb2_grpc
from services.errors import ServiceError, overloaded, unavailable
from services.frontend import served_model
from services.frontend.generation import Generation
from services.frontend.health_probe import HealthProbe
from services.frontend.served_model import ServedModel
from services.frontend.text.errors import ModelTextError

logger = logging.getLogger(__name__)

INFO_DEADLINE_S = 5.0
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0
DEFAULT_RETRY_MS = 1000
# How long a full queue is taken to stay full.
FULL_FOR_S = 0.1


class EngineLink:
    """Owns every request on the engine. When the session breaks all of them end with one error."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = engine_pb2_grpc.EngineServiceStub(channel)
        self.probe = HealthProbe(channel, on_lost=self._give_up_session)
        self.model: ServedModel | None = None
        self._trouble: str | None = "the engine is not connected yet"
        self._generations: dict[str, Generation] = {}
        self._outbox: deque[engine_pb2.SessionRequest] = deque()
        self._has_mail = asyncio.Event()
        self._gave_up = False
        self._refusal: ServiceError | None = None  # the engine's last word about a full queue
        self._full_until = 0.0  # monotonic seconds
        self._call: grpc.aio.StreamStreamCall[engine_pb2.SessionRequest, engine_pb2.SessionResponse] | None
        self._call = None

    @property
    def trouble(self) -> str | None:
        """Why a request cannot be served now; None when it can."""
        if self._trouble is None and not self.probe.is_serving:
            return "the engine does not answer or is not serving"
        return self._trouble

    def refuse_when_full(self) -> None:
        """Raises while the engine's last word is that its queue is full: in a flood, an answer at once."""
        if self._refusal is not None and time.monotonic() < self._full_until:
            raise replace(self._refusal)

    def submit(self, generation: Generation) -> None:
        self._generations[generation.submit.request_id] = generation
        self._post(engine_pb2.SessionRequest(submit=generation.submit))

    def release(self, generations: list[Generation]) -> None:
        """Forgets requests; those that the engine still runs are aborted. Idempotent."""
        ids = [g.submit.request_id for g in generations]
        running = [i for i in ids if self._generations.pop(i, None) is not None]
        if running and self._call is not None:
            self._post(engine_pb2.SessionRequest(abort=engine_pb2.AbortSequences(request_ids=running)))

    async def run(self) -> None:
        """Keeps the session up until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            started = time.monotonic()
            await self._connect_and_serve()
            backoff_s = FIRST_BACKOFF_S if time.monotonic() - started > MAX_BACKOFF_S else backoff_s * 2
            await asyncio.sleep(min(backoff_s, MAX_BACKOFF_S))

    async def _connect_and_serve(self) -> None:
        try:
            info = await self.stub.GetEngineInfo(engine_pb2.GetEngineInfoRequest(), timeout=INFO_DEADLINE_S)
            if self.model is None or self.model.info != info:
                self.model = await asyncio.to_thread(served_model.load, info)
            await self._serve_session()
        except grpc.aio.AioRpcError as error:
            self._lose(f"the engine cannot be reached: {error.details()}")
        except ModelTextError as error:
            self._lose(str(error))
        except Exception:
            # A message that makes no sense must not end the link for good.
            logger.exception("the engine's session failed")
            self._lose("the session with the engine failed")

    async def _serve_session(self) -> None:
        call = self._call = self.stub.Session()
        self._outbox.clear()
        self._gave_up = False
        self._trouble = None
        logger.info("engine session is up")
        writing = asyncio.create_task(self._write(call))
        try:
            # Cheaper than iterating over the call: this happens at every step.
            while isinstance(response := await call.read(), engine_pb2.SessionResponse):
                self._dispatch(response)
            self._lose("the engine ended the session")
        except asyncio.CancelledError:
            # A call that is cancelled here ends its reader this way, and so does the end of this task.
            if not self._gave_up:
                raise
            self._lose("the engine does not answer")
        finally:
            self._call = None
            writing.cancel()
            call.cancel()
            with suppress(asyncio.CancelledError):
                await writing

    async def _write(
        self, call: "grpc.aio.StreamStreamCall[engine_pb2.SessionRequest, engine_pb2.SessionResponse]"
    ) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader sees the same end
            while True:
                await self._has_mail.wait()
                self._has_mail.clear()
                while self._outbox:
                    await call.write(self._outbox.popleft())

    def _post(self, request: engine_pb2.SessionRequest) -> None:
        self._outbox.append(request)
        self._has_mail.set()

    def _dispatch(self, response: engine_pb2.SessionResponse) -> None:
        kind = response.WhichOneof("response")
        if kind == "step":
            step, now = response.step, time.time()
            for output in step.outputs:
                if (generation := self._generations.get(output.request_id)) is not None:
                    ended_here = generation.take_output(output, step.pool, now)
                    self._drop_if_done(generation)
                    if ended_here and not generation.done:
                        self._abort_choice(output)
        elif kind == "accepted":
            if (generation := self._generations.get(response.accepted.request_id)) is not None:
                generation.accept()
        elif kind == "rejected":
            if (generation := self._generations.pop(response.rejected.request_id, None)) is not None:
                error = _rejection(response.rejected)
                if error.reason == "QUEUE_FULL":
                    self._refusal, self._full_until = error, time.monotonic() + FULL_FOR_S
                generation.fail(error)

    def _drop_if_done(self, generation: Generation) -> None:
        if not generation.done:
            return
        if generation.num_running > 0:
            self.release([generation])
        else:
            self._generations.pop(generation.submit.request_id, None)

    def _abort_choice(self, output: engine_pb2.SequenceOutput) -> None:
        choice = engine_pb2.AbortSequences.Choice(request_id=output.request_id, index=output.index)
        self._post(engine_pb2.SessionRequest(abort=engine_pb2.AbortSequences(choices=[choice])))

    def _give_up_session(self) -> None:
        if self._call is not None:
            self._gave_up = True
            self._call.cancel()

    def _lose(self, reason: str) -> None:
        """Ends what was running. Taking it over on another engine would start here."""
        if self._trouble != reason:
            logger.warning("no session with the engine: %s", reason)
        self._trouble = reason
        lost, self._generations = self._generations, {}
        for generation in lost.values():
            generation.fail(unavailable(reason, "ENGINE_LOST", DEFAULT_RETRY_MS))


def _rejection(rejected: engine_pb2.Rejected) -> ServiceError:
    reasons = engine_pb2.Rejected
    message = rejected.message or "the engine refused the request"
    if rejected.reason == reasons.REASON_QUEUE_FULL:
        return overloaded(message, "QUEUE_FULL", rejected.retry_after_ms or DEFAULT_RETRY_MS)
    if rejected.reason == reasons.REASON_DRAINING:
        return unavailable(message, "DRAINING", DEFAULT_RETRY_MS)
    if rejected.reason in (reasons.REASON_INVALID, reasons.REASON_TOO_LARGE):
        name = reasons.Reason.Name(rejected.reason).removeprefix("REASON_")
        return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, message, name)
    return ServiceError(grpc.StatusCode.INTERNAL, message, "REJECTED")
