"""The client: one channel, one method per thing to ask."""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from nexuskv.v1 import inference_pb2 as pb
from nexuskv.v1 import inference_pb2_grpc
from nexuskv_client import results
from nexuskv_client.errors import from_rpc_error
from nexuskv_client.results import Choice, Generation, Model, ServerInfo, Timings, TokenLogprob, Usage

# A prompt is text, token ids or a conversation.
Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]

# Sampling fields that are lists of strings; one string stands for a list of it.
_LISTS = ("stop", "bad_words")

_MAX_MESSAGE_BYTES = 64 << 20
_OPTIONS = [
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
]


if TYPE_CHECKING:
    _StreamCall = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.StreamGenerateResponse]


class Stream:
    """Iterates over deltas. When it is exhausted `usage` and `timings` are set.

    Leaving a loop early is fine inside `async with client.stream(...)`: the request is aborted.
    """

    def __init__(
        self, call: "grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.StreamGenerateResponse]"
    ) -> None:
        self._call = call
        self.request_id: str | None = None
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()

    async def __aenter__(self) -> "Stream":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call.cancel()
        await self._call.code()

    def __aiter__(self) -> AsyncIterator[Choice]:
        return self._deltas()

    async def _deltas(self) -> AsyncIterator[Choice]:
        with _typed_errors():
            async for message in self._call:
                self.request_id = message.request_id
                if message.HasField("usage"):
                    self.usage = results.usage(message.usage)
                    self.timings = results.timings(message.timings)
                    self.prompt_logprobs = results.logprobs(message.prompt_logprobs)
                else:
                    yield results.choice(message.delta)


class Client:
    """Talks to InferenceService at `address` (host:port). Use it as an async context manager.

    Every method takes `deadline_s`: the call fails with DeadlineExceededError after that many seconds, and
    a request that still runs is aborted. Errors are those of `nexuskv_client.errors`.
    """

    def __init__(self, address: str, *, default_deadline_s: float | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._default_deadline_s = default_deadline_s

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what still runs and closes the channel."""
        await self._channel.close()

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        cache_salt: str | None = None,
        priority: int | None = None,
        deadline_s: float | None = None,
        **sampling: Any,
    ) -> Generation:
        """The whole answer. `sampling` are fields of SamplingParams: temperature, max_tokens, stop, n …"""
        request = _request(prompt, model, request_id, cache_salt, priority, sampling)
        with _typed_errors():
            return results.generation(await self._stub.Generate(request, timeout=self._deadline(deadline_s)))

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        cache_salt: str | None = None,
        priority: int | None = None,
        deadline_s: float | None = None,
        **sampling: Any,
    ) -> Stream:
        """The answer as it comes."""
        request = _request(prompt, model, request_id, cache_salt, priority, sampling)
        return Stream(self._stub.StreamGenerate(request, timeout=self._deadline(deadline_s)))

    async def chat(self, message: str, *, system: str | None = None, **options: Any) -> str:
        """One question, one answer. `options` as for `generate`."""
        messages = [{"role": "system", "content": system}] if system is not None else []
        return (await self.generate([*messages, {"role": "user", "content": message}], **options)).text

    async def abort(self, request_id: str, *, deadline_s: float | None = None) -> bool:
        """Ends every running request of that id; False when there is none."""
        request = pb.AbortRequest(request_id=request_id)
        with _typed_errors():
            return (await self._stub.Abort(request, timeout=self._deadline(deadline_s))).found

    async def tokenize(
        self, prompt: str | Sequence[Mapping[str, str]], *, model: str = "", deadline_s: float | None = None
    ) -> list[int]:
        request = pb.TokenizeRequest(model=model)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.chat.CopyFrom(_chat(prompt))
        with _typed_errors():
            answer = await self._stub.Tokenize(request, timeout=self._deadline(deadline_s))
        return list(answer.token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", deadline_s: float | None = None
    ) -> str:
        request = pb.DetokenizeRequest(model=model, token_ids=token_ids)
        with _typed_errors():
            return (await self._stub.Detokenize(request, timeout=self._deadline(deadline_s))).text

    async def list_models(self, *, deadline_s: float | None = None) -> list[Model]:
        with _typed_errors():
            answer = await self._stub.ListModels(pb.ListModelsRequest(), timeout=self._deadline(deadline_s))
        return [Model(m.id, m.root, m.max_model_len) for m in answer.models]

    async def server_info(self, *, deadline_s: float | None = None) -> ServerInfo:
        with _typed_errors():
            answer = await self._stub.GetServerInfo(
                pb.GetServerInfoRequest(), timeout=self._deadline(deadline_s)
            )
        return results.server_info(answer)

    def _deadline(self, deadline_s: float | None) -> float | None:
        return self._default_deadline_s if deadline_s is None else deadline_s


@contextmanager
def _typed_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


def _request(
    prompt: Prompt,
    model: str,
    request_id: str,
    cache_salt: str | None,
    priority: int | None,
    sampling: Mapping[str, Any],
) -> pb.GenerateRequest:
    """Raises TypeError for a prompt or a sampling field that does not exist or has the wrong type."""
    lists = {name: [sampling[name]] for name in _LISTS if isinstance(sampling.get(name), str)}
    try:
        params = pb.SamplingParams(**{**sampling, **lists})
    except ValueError as error:
        raise TypeError(f"sampling: {error}") from error
    request = pb.GenerateRequest(
        model=model, request_id=request_id, sampling=params, cache_salt=cache_salt, priority=priority
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        request.chat.CopyFrom(_chat(prompt))  # type: ignore[arg-type]
    else:
        request.token_ids.CopyFrom(pb.TokenIds(ids=prompt))  # type: ignore[arg-type]
    return request


def _chat(messages: Sequence[Mapping[str, str]]) -> pb.Chat:
    return pb.Chat(messages=[pb.ChatMessage(**message) for message in messages])
