"""The gRPC door: InferenceService over the core. Methods translate; the core decides."""

import time
import uuid

import grpc.aio

from nexuskv.v1 import inference_pb2, inference_pb2_grpc
from services.errors import ServiceError, abort
from services.frontend import grpc_conversion as conversion
from services.frontend.active_request import ActiveRequest, Prompt
from services.frontend.core import FrontendCore, RequestOptions
from services.frontend.rules import check_token_ids
from services.frontend.served_model import ALIAS
from services.frontend.version import server_version

SERVICE_NAME = "nexuskv.v1.InferenceService"

Context = grpc.aio.ServicerContext[object, object]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, core: FrontendCore) -> None:
        self._core = core
        self._started = time.monotonic()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> inference_pb2.GenerateResponse:
        try:
            with await self._start(request, stream=False) as active:
                deltas = await active.finished()
        except ServiceError as error:
            await abort(context, error)
        tokenizer = self._core.model().tokenizer
        return inference_pb2.GenerateResponse(
            request_id=active.request_id,
            model=self._model_name(request),
            choices=[conversion.from_delta(delta, tokenizer) for delta in deltas],
            usage=conversion.from_usage(active.usage),
            timings=conversion.from_timings(active.generations[0].timings),
            prompt_logprobs=conversion.from_logprobs(active.generations[0].prompt_logprobs, tokenizer),
        )

    # Writing, not yielding: a cancelled call then ends inside this coroutine, and with it the request.
    async def StreamGenerate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> None:
        try:
            with await self._start(request, stream=True) as active:
                await self._stream(request, active, context)
        except ServiceError as error:
            await abort(context, error)

    async def _stream(
        self, request: inference_pb2.GenerateRequest, active: ActiveRequest, context: Context
    ) -> None:
        request_id, model = active.request_id, self._model_name(request)
        tokenizer = self._core.model().tokenizer
        message = inference_pb2.StreamGenerateResponse
        async for deltas in active.deltas():
            for delta in deltas:
                choice = conversion.from_delta(delta, tokenizer)
                await context.write(message(request_id=request_id, model=model, delta=choice))
        usage = conversion.from_usage(active.usage)
        timings = conversion.from_timings(active.generations[0].timings)
        scored = conversion.from_logprobs(active.generations[0].prompt_logprobs, tokenizer)
        last = message(request_id=request_id, model=model, usage=usage, timings=timings)
        last.prompt_logprobs.extend(scored)
        await context.write(last)

    async def Abort(
        self, request: inference_pb2.AbortRequest, context: Context
    ) -> inference_pb2.AbortResponse:
        return inference_pb2.AbortResponse(found=self._core.abort(request.request_id))

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: Context
    ) -> inference_pb2.TokenizeResponse:
        try:
            model = self._core.model(request.model)
            kind = request.WhichOneof("input")
            if kind == "chat":
                text = self._core.render_chat(conversion.to_messages(request.chat), {})
            elif kind == "text":
                text = request.text
            else:
                raise conversion.no_input()
            token_ids = await self._core.tokenize(text)
        except ServiceError as error:
            await abort(context, error)
        return inference_pb2.TokenizeResponse(token_ids=token_ids, max_model_len=model.info.max_model_len)

    async def Detokenize(
        self, request: inference_pb2.DetokenizeRequest, context: Context
    ) -> inference_pb2.DetokenizeResponse:
        try:
            model = self._core.model(request.model)
            check_token_ids("token_ids", list(request.token_ids), model.info.vocab_size)
        except ServiceError as error:
            await abort(context, error)
        return inference_pb2.DetokenizeResponse(text=model.tokenizer.decode(request.token_ids))

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: Context
    ) -> inference_pb2.ListModelsResponse:
        try:
            info = self._core.model().info
        except ServiceError as error:
            await abort(context, error)
        models = [
            inference_pb2.Model(id=name, root=info.model, max_model_len=info.max_model_len)
            for name in (info.model, ALIAS)
        ]
        return inference_pb2.ListModelsResponse(models=models)

    async def GetServerInfo(
        self, request: inference_pb2.GetServerInfoRequest, context: Context
    ) -> inference_pb2.GetServerInfoResponse:
        try:
            model = self._core.model()
        except ServiceError as error:
            await abort(context, error)
        return conversion.from_model(model, server_version(), time.monotonic() - self._started)

    async def _start(self, request: inference_pb2.GenerateRequest, *, stream: bool) -> ActiveRequest:
        arrival = time.time()
        await self._core.turnstile.wait()
        self._core.require_serving()
        self._core.model(request.model)
        sampling = conversion.to_sampling(request.sampling)
        options = RequestOptions(
            stream=stream,
            prompt_field=request.WhichOneof("input") or "input",
            arrival=arrival,
            cache_salt=conversion.to_salt(request),
            priority=conversion.to_priority(request),
        )
        prompt = await self._prompt(request)
        return self._core.start(request.request_id or uuid.uuid4().hex, [prompt], sampling, options)

    async def _prompt(self, request: inference_pb2.GenerateRequest) -> Prompt:
        kind = request.WhichOneof("input")
        if kind == "token_ids":
            return Prompt(list(request.token_ids.ids))
        if kind == "text":
            return Prompt(await self._core.encode(request.text, "text"), request.text)
        if kind == "chat":
            text = self._core.render_chat(conversion.to_messages(request.chat), {})
            return Prompt(await self._core.encode(text, "chat"), text)
        raise conversion.no_input()

    def _model_name(self, request: inference_pb2.GenerateRequest) -> str:
        return request.model or self._core.model().name
