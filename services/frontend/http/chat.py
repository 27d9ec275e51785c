"""POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from services.errors import invalid
from services.frontend.active_request import ActiveRequest, Prompt
from services.frontend.chat_messages import check_messages
from services.frontend.core import FrontendCore
from services.frontend.http import fields
from services.frontend.http.endpoint import Call, check_prompt_logprobs, read_call, whole_answer
from services.frontend.http.spelling import (
    finite,
    prompt_logprobs,
    stop_reason,
    to_json,
    usage_object,
    visible_logprobs,
)
from services.frontend.http.streaming import EventStream
from services.frontend.outputs import Delta
from services.frontend.rules import Flag, Integer, shown
from services.frontend.sampling import MAX_LOGPROBS, Sampling
from services.frontend.text.tokenizer import Tokenizer


class ChatCompletions:
    def __init__(self, core: FrontendCore, max_body_bytes: int) -> None:
        self._core = core
        self._max_body_bytes = max_body_bytes

    async def post(self, request: Request) -> Response:
        call = await read_call(self._core, request, self._max_body_bytes)
        sampling = read_sampling(call.body)
        check_prompt_logprobs(call, sampling)
        options = call.options("messages")
        prompt = await self._prompt(call.body)

        def start() -> ActiveRequest:
            return self._core.start(call.request_id, [prompt], sampling, options)

        if call.wishes.stream:
            return EventStream(start, lambda active: ChunkWriter(call, active, sampling))
        return await whole_answer(
            call, request, start, lambda active, deltas: completion(call, active, deltas, sampling, prompt)
        )

    async def _prompt(self, body: fields.Body) -> Prompt:
        text = render(self._core, body)
        return Prompt(await self._core.encode(text, "messages"), text)


def render(core: FrontendCore, body: fields.Body) -> str:
    """The conversation of a body as the model's template writes it."""
    messages = check_messages("messages", body.get("messages"))
    variables = body.get("chat_template_kwargs", {})
    if not isinstance(variables, dict):
        raise invalid(
            "chat_template_kwargs", f"chat_template_kwargs must be an object, got {shown(variables)}"
        )
    asks = fields.flag(body, "add_generation_prompt", True)
    return core.render_chat(messages, {**variables, "add_generation_prompt": asks})


def read_sampling(body: fields.Body) -> Sampling:
    values = fields.sampling_values(body, without=("logprobs",))
    if "max_completion_tokens" in body:
        rule = fields.SAMPLING_RULES["max_tokens"]
        values["max_tokens"] = rule.check("max_completion_tokens", body["max_completion_tokens"])
    wants = Flag().check("logprobs", body.get("logprobs", False))
    if "top_logprobs" in body:
        values["logprobs"] = Integer(0, MAX_LOGPROBS).check("top_logprobs", body["top_logprobs"])
        if not wants:
            raise invalid("top_logprobs", "top_logprobs is only allowed together with logprobs: true")
    elif wants:
        values["logprobs"] = 0
    return Sampling(**values)


class ChunkWriter:
    """Spells chat.completion.chunk events. All but the new text is spelt once, ahead."""

    def __init__(self, call: Call, active: ActiveRequest, sampling: Sampling) -> None:
        self._active = active
        self._wishes = call.wishes
        self._sampling = sampling
        self._tokenizer = call.model.tokenizer
        self._head = to_json(call.head(_id(call), "chat.completion.chunk"))[:-1]
        self._end = ',"usage":null}\n\n' if call.wishes.include_usage else "}\n\n"

    def opening(self) -> bytes:
        role = '{"role":"assistant","content":"","refusal":null}'
        return "".join([self._chunk(i, role) for i in range(self._sampling.n)]).encode()

    def delta(self, delta: Delta) -> bytes:
        events = ""
        if delta.text or delta.logprobs:
            logprobs = "null"
            if delta.logprobs:
                logprobs = to_json(_logprobs(delta, self._tokenizer, self._sampling))
            events = self._chunk(delta.index, '{"content":' + to_json(delta.text) + "}", logprobs)
        if delta.finish_reason is not None:
            finish = f'"{delta.finish_reason}","stop_reason":{to_json(stop_reason(delta, self._sampling))}'
            events += self._chunk(delta.index, "{}", finish=finish)
        return events.encode()

    def closing(self) -> bytes:
        usage = ""
        if self._wishes.include_usage:
            usage = f'data: {self._head},"choices":[],"usage":{self._usage()}}}\n\n'
        return (usage + "data: [DONE]\n\n").encode()

    def _chunk(self, index: int, delta: str, logprobs: str = "null", finish: str = "null") -> str:
        end = f',"usage":{self._usage()}}}\n\n' if self._wishes.continuous_usage else self._end
        return (
            f'data: {self._head},"choices":[{{"index":{index},"delta":{delta},'
            f'"logprobs":{logprobs},"finish_reason":{finish}}}]{end}'
        )

    def _usage(self) -> str:
        return to_json(usage_object(self._active.usage))


def completion(
    call: Call, active: ActiveRequest, deltas: Sequence[Delta], sampling: Sampling, prompt: Prompt
) -> dict[str, Any]:
    answer = {
        **call.head(_id(call), "chat.completion"),
        "choices": [_choice(delta, call.model.tokenizer, sampling) for delta in deltas],
        "usage": usage_object(active.usage),
    }
    if sampling.prompt_logprobs is not None:
        entries = active.generations[0].prompt_logprobs
        answer["prompt_logprobs"] = prompt_logprobs(entries, call.model.tokenizer)
    return answer


def _id(call: Call) -> str:
    return f"chatcmpl-{call.request_id}"


def _choice(delta: Delta, tokenizer: Tokenizer, sampling: Sampling) -> dict[str, Any]:
    return {
        "index": delta.index,
        "message": {"role": "assistant", "content": delta.text, "refusal": None},
        "logprobs": _logprobs(delta, tokenizer, sampling),
        "finish_reason": delta.finish_reason,
        "stop_reason": stop_reason(delta, sampling),
    }


def _logprobs(delta: Delta, tokenizer: Tokenizer, sampling: Sampling) -> dict[str, Any] | None:
    if sampling.logprobs is None:
        return None

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        token_bytes = list(tokenizer.decode_bytes([token_id]))
        text = tokenizer.token_text(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": token_bytes}

    content = [
        {**entry(e.token_id, e.logprob), "top_logprobs": [entry(i, value) for i, value in e.top]}
        for e in visible_logprobs(delta)
    ]
    return {"content": content, "refusal": None}
