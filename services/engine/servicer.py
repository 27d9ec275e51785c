"""EngineService: translates between messages and the engine's worker."""

import asyncio
import time
from collections.abc import AsyncIterator

import grpc.aio

from engine.build import ModelInfo
from engine.outputs import SequenceOutput
from nexuskv.v1 import engine_pb2 as pb
from nexuskv.v1 import engine_pb2_grpc
from services.arrays import unpack_int32
from services.engine.convert import load_to_pb, pool_to_pb
from services.engine.sessions import FrontendSession, Sessions
from services.engine.worker import EngineWorker

DRAIN_POLL_S = 0.05


class EngineServicer(engine_pb2_grpc.EngineServiceServicer):
    def __init__(self, info: ModelInfo, engine_id: str) -> None:
        self._info = info
        self._engine_id = engine_id
        self._sessions = Sessions()
        self._draining = False
        self.worker: EngineWorker

    def deliver(self, outputs: list[SequenceOutput]) -> None:
        engine = self.worker.engine
        pool = pool_to_pb(engine.load(), engine.metrics)
        self._sessions.deliver(engine.metrics.num_steps, outputs, pool)

    async def Session(
        self,
        request_iterator: AsyncIterator[pb.SessionRequest],
        context: "grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse]",
    ) -> AsyncIterator[pb.SessionResponse]:
        session = self._sessions.open(self.worker)
        reader = asyncio.create_task(self._read(request_iterator, session))
        try:
            while (response := await session.responses.get()) is not None:
                yield response
        finally:
            reader.cancel()
            self._sessions.close(session)

    async def _read(self, requests: AsyncIterator[pb.SessionRequest], session: FrontendSession) -> None:
        """Takes the frontend's messages until it hangs up."""
        try:
            async for request in requests:
                if request.HasField("submit"):
                    session.submit(request.submit, self._problem(request.submit), self._draining)
                elif request.HasField("abort"):
                    session.abort(request.abort.request_ids)
                    session.abort_choices(request.abort.choices)
        finally:
            session.responses.put_nowait(None)

    async def GetEngineInfo(
        self, request: pb.GetEngineInfoRequest, context: object
    ) -> pb.GetEngineInfoResponse:
        info = self._info
        return pb.GetEngineInfoResponse(
            engine_id=self._engine_id,
            model=info.name,
            model_path=str(info.path),
            model_fingerprint=info.fingerprint,
            device=info.device,
            dtype=info.dtype,
            max_model_len=info.limits.max_model_len,
            vocab_size=info.vocab_size,
            num_blocks=info.limits.num_blocks,
            block_size=info.block_size,
            max_num_seqs=info.limits.max_num_seqs,
            max_num_batched_tokens=info.limits.max_num_batched_tokens,
        )

    async def GetLoad(self, request: pb.GetLoadRequest, context: object) -> pb.GetLoadResponse:
        engine = self.worker.engine
        return load_to_pb(engine.load(), engine.metrics)

    async def Drain(self, request: pb.DrainRequest, context: object) -> pb.DrainResponse:
        self._draining = True
        deadline = time.monotonic() + request.timeout_ms / 1e3
        while self._sessions.num_running and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
        return pb.DrainResponse(num_aborted=self._sessions.abort_all())

    def _problem(self, submit: pb.Submit) -> str | None:
        """What is wrong with a request, in one sentence naming the field and what is allowed."""
        for name in ("prompt_token_ids", "output_token_ids"):
            data = getattr(submit, name)
            if len(data) % 4:
                return f"{name} holds {len(data)} bytes, not a multiple of 4"
            ids = unpack_int32(data)
            if len(ids) and (ids.min() < 0 or ids.max() >= self._info.vocab_size):
                return f"{name} must lie in 0..{self._info.vocab_size - 1}"
        if not submit.prompt_token_ids:
            return "prompt_token_ids must not be empty"
        if not 1 <= submit.num_choices <= self._info.limits.max_num_seqs:
            return f"num_choices must lie in 1..{self._info.limits.max_num_seqs}"
        if submit.output_token_ids and submit.num_choices > 1:
            return "output_token_ids goes with one choice"
        if len(submit.output_token_ids) // 4 >= max(submit.sampling.max_tokens, 1):
            return "output_token_ids must be fewer than max_tokens"
        return self._sampling_problem(submit.sampling)

    def _sampling_problem(self, s: pb.EngineSampling) -> str | None:
        tokens = {
            "logit_bias": s.logit_bias,
            "stop_token_ids": s.stop_token_ids,
            "bad_words": [token for word in s.bad_words for token in word.ids],
        }
        for name, ids in tokens.items():
            if any(not 0 <= token < self._info.vocab_size for token in ids):
                return f"{name} must lie in 0..{self._info.vocab_size - 1}"
        checks = (
            (s.temperature >= 0, "temperature must be at least 0"),
            (0 < s.top_p <= 1, "top_p must lie in (0, 1]"),
            (s.top_k >= 0, "top_k must be at least 0"),
            (0 <= s.min_p <= 1, "min_p must lie in [0, 1]"),
            (s.repetition_penalty > 0, "repetition_penalty must be greater than 0"),
            (s.max_tokens >= 1, "max_tokens must be at least 1"),
            (s.min_tokens >= 0, "min_tokens must be at least 0"),
            (all(word.ids for word in s.bad_words), "bad_words must not have an empty sequence"),
            (0 <= s.num_logprobs <= self._info.vocab_size, "num_logprobs is out of range"),
            (0 <= s.num_prompt_logprobs <= self._info.vocab_size, "num_prompt_logprobs is out of range"),
        )
        return next((message for holds, message in checks if not holds), None)
