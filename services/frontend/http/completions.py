"""POST /v1/completions."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import Request, Response

from services.errors import invalid
from services.frontend.active_request import ActiveRequest, Prompt
from services.frontend.core import FrontendCore
from services.frontend.http import fields
from services.frontend.http.completion_logprobs import logprobs_object, prompt_entries
from services.frontend.http.endpoint import Call, check_prompt_logprobs, read_call, whole_answer
from services.frontend.http.spelling import (
    prompt_logprobs,
    stop_reason,
    to_json,
    usage_object,
    visible_logprobs,
)
from services.frontend.http.streaming import EventStream
from services.frontend.outputs import Delta
from services.frontend.rules import INT32_MAX, Integer, shown
from services.frontend.sampling import Sampling
from services.frontend.text.detokenizer import unfinished_tail

# OpenAI's default for this endpoint.
DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024
MAX_CHOICES = 2048
_MAX_TOKENS = Integer(0, INT32_MAX)
_BEST_OF = Integer(1, MAX_CHOICES)


@dataclass(frozen=True)
class Wishes:
    """How the answer is to be spelt."""

    sampling: Sampling
    prompts: Sequence[Prompt]
    echo: bool
    shows_prompt_logprobs: bool  # asked for by name, not by echo


class Completions:
    def __init__(self, core: FrontendCore, max_body_bytes: int) -> None:
        self._core = core
        self._max_body_bytes = max_body_bytes

    async def post(self, request: Request) -> Response:
        call = await read_call(self._core, request, self._max_body_bytes)
        body, echo = call.body, fields.flag(call.body, "echo")
        sampling = _sampling(body, echo)
        if not echo:
            check_prompt_logprobs(call, sampling)
        prompts = await self._prompts(body, sampling)
        wishes = Wishes(sampling, prompts, echo, "prompt_logprobs" in body)
        options = call.options("prompt")

        def start() -> ActiveRequest:
            return self._core.start(call.request_id, prompts, sampling, options)

        if call.wishes.stream:
            return EventStream(start, lambda active: ChunkWriter(call, active, wishes))
        return await whole_answer(
            call, request, start, lambda active, deltas: _completion(call, active, deltas, wishes)
        )

    async def _prompts(self, body: fields.Body, sampling: Sampling) -> list[Prompt]:
        given = split_prompts(body.get("prompt"))
        if len(given) * sampling.n > MAX_CHOICES:
            raise invalid("n", f"{len(given)} prompts times n={sampling.n}: at most {MAX_CHOICES} choices")
        prompts = []
        for prompt in given:
            prompts.append(await read_prompt(self._core, prompt))
            # Many short prompts are tokenized on the loop: let others run in between.
            await asyncio.sleep(0)
        return prompts


def split_prompts(value: Any) -> list[str | list[int]]:
    """A prompt is a string or token ids; several are an array of such. Raises ServiceError."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        kinds = set(map(type, value))
        if kinds == {int}:
            return [value]
        many = kinds == {str} or (kinds == {list} and all(set(map(type, v)) <= {int} for v in value))
        if many and len(value) <= MAX_PROMPTS:
            return value
    raise invalid(
        "prompt",
        "prompt must be a string, an array of token ids, or an array of at most "
        f"{MAX_PROMPTS} of either, got {shown(value)}",
    )


async def read_prompt(core: FrontendCore, prompt: str | list[int]) -> Prompt:
    if isinstance(prompt, list):
        return Prompt(prompt)
    return Prompt(await core.encode(prompt, "prompt"), prompt)


def _sampling(body: fields.Body, echo: bool) -> Sampling:
    values = {"max_tokens": DEFAULT_MAX_TOKENS, **fields.sampling_values(body, without=("max_tokens",))}
    if "max_tokens" in body:
        values["max_tokens"] = _MAX_TOKENS.check("max_tokens", body["max_tokens"])
    sampling = Sampling(**values)
    if _BEST_OF.check("best_of", body.get("best_of", sampling.n)) != sampling.n:
        raise invalid("best_of", f"best_of must be equal to n ({sampling.n}) on this server")
    if echo and sampling.logprobs is not None and sampling.prompt_logprobs is None:
        return replace(sampling, prompt_logprobs=sampling.logprobs)
    return sampling


class ChunkWriter:
    """Spells text_completion events; with echo each choice begins with its prompt."""

    def __init__(self, call: Call, active: ActiveRequest, wishes: Wishes) -> None:
        self._call = call
        self._active = active
        self._wishes = wishes
        self._head = to_json(call.head(_id(call), "text_completion"))[:-1]
        self._end = ',"usage":null}\n\n' if call.wishes.include_usage else "}\n\n"
        num_choices = len(wishes.prompts) * wishes.sampling.n
        self._to_echo = set(range(num_choices)) if wishes.echo else set[int]()

    def opening(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        echoes = delta.index in self._to_echo
        self._to_echo.discard(delta.index)
        text, logprobs = _text_and_logprobs(self._call, self._active, delta, self._wishes, echoes)
        finish = to_json(delta.finish_reason)
        usage = self._end
        if self._call.wishes.continuous_usage:
            usage = f',"usage":{self._usage()}}}\n\n'
        return (
            f'data: {self._head},"choices":[{{"index":{delta.index},"text":{to_json(text)},'
            f'"logprobs":{to_json(logprobs)},"finish_reason":{finish},'
            f'"stop_reason":{to_json(stop_reason(delta, self._wishes.sampling))}}}]{usage}'
        ).encode()

    def closing(self) -> bytes:
        usage = ""
        if self._call.wishes.include_usage:
            usage = f'data: {self._head},"choices":[],"usage":{self._usage()}}}\n\n'
        return (usage + "data: [DONE]\n\n").encode()

    def _usage(self) -> str:
        return to_json(usage_object(self._active.usage))


def _id(call: Call) -> str:
    return f"cmpl-{call.request_id}"


def _completion(call: Call, active: ActiveRequest, deltas: Sequence[Delta], wishes: Wishes) -> dict[str, Any]:
    return {
        **call.head(_id(call), "text_completion"),
        "choices": [_choice(call, active, delta, wishes) for delta in deltas],
        "usage": usage_object(active.usage),
    }


def _choice(call: Call, active: ActiveRequest, delta: Delta, wishes: Wishes) -> dict[str, Any]:
    text, logprobs = _text_and_logprobs(call, active, delta, wishes, wishes.echo)
    choice = {
        "index": delta.index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": delta.finish_reason,
        "stop_reason": stop_reason(delta, wishes.sampling),
    }
    if wishes.shows_prompt_logprobs:
        entries = active.generations[delta.index // wishes.sampling.n].prompt_logprobs
        choice["prompt_logprobs"] = prompt_logprobs(entries, call.model.tokenizer)
    return choice


def _text_and_logprobs(
    call: Call, active: ActiveRequest, delta: Delta, wishes: Wishes, echoes: bool
) -> tuple[str, dict[str, Any] | None]:
    """The choice's new text and its logprobs object, with the prompt in front when it is echoed."""
    tokenizer, number = call.model.tokenizer, delta.index // wishes.sampling.n
    prompt = wishes.prompts[number]
    prompt_text = ""
    if wishes.echo:
        prompt_text = prompt.text if prompt.text is not None else _decode(call, prompt.token_ids)
    text = prompt_text + delta.text if echoes else delta.text
    if wishes.sampling.logprobs is None:
        return text, None
    entries = [e._replace(offset=e.offset + len(prompt_text)) for e in visible_logprobs(delta)]
    if echoes:
        scored = active.generations[number].prompt_logprobs
        entries = [*prompt_entries(prompt, prompt_text, scored, tokenizer), *entries]
    return text, logprobs_object(entries, tokenizer)


def _decode(call: Call, token_ids: list[int]) -> str:
    """A prompt's text; a character that it leaves unfinished belongs to the answer."""
    data = call.model.tokenizer.decode_bytes(token_ids)
    return data.removesuffix(unfinished_tail(data)).decode("utf-8", "replace")
