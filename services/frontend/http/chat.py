"""POST /v1/chat/completions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response

from services.errors import invalid
from services.frontend.active_request import ActiveRequest, Prompt
from services.frontend.chat_messages import check_messages
from services.frontend.core import FrontendCore, RequestOptions
from services.frontend.http import fields
from services.frontend.http.body import read_object
from services.frontend.http.spelling import (
    finite,
    prompt_logprobs,
    to_json,
    usage_object,
    visible_logprobs,
)
from services.frontend.http.streaming import EventStream, abort_on_disconnect
from services.frontend.outputs import Delta, TokenLogprob
from services.frontend.rules import Flag, Integer, shown
from services.frontend.sampling import MAX_LOGPROBS, Sampling
from services.frontend.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Answer:
    """What every object of one answer has in common."""

    id: str
    model: str
    created: int
    fingerprint: str
    tokenizer: Tokenizer
    wants_logprobs: bool

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


class ChatCompletions:
    def __init__(self, core: FrontendCore, max_body_bytes: int) -> None:
        self._core = core
        self._max_body_bytes = max_body_bytes

    async def post(self, request: Request) -> Response:
        core = self._core
        core.require_serving()
        body = await read_object(request, self._max_body_bytes)
        model = core.model(fields.model_name(body))
        fields.refuse_unsupported(body)
        wishes, sampling = fields.stream_wishes(body), _sampling(body)
        if wishes.stream and sampling.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "prompt_logprobs is not available together with stream: true")
        options = RequestOptions(
            stream=wishes.stream,
            prompt_field="messages",
            cache_salt=fields.salt(body),
            priority=fields.priority(body),
            skip_special_tokens=fields.flag(body, "skip_special_tokens", True),
        )
        prompt = await self._prompt(body)
        request_id = fields.request_id(request)
        answer = Answer(
            id=f"chatcmpl-{request_id}",
            model=fields.model_name(body) or model.name,
            created=fields.now_s(),
            fingerprint=model.info.model_fingerprint,
            tokenizer=model.tokenizer,
            wants_logprobs=sampling.logprobs is not None,
        )

        def start() -> ActiveRequest:
            return core.start(request_id, [prompt], sampling, options)

        if wishes.stream:
            return EventStream(start, lambda active: ChunkWriter(active, answer, wishes, sampling.n))
        with start() as active:
            async with abort_on_disconnect(request.receive, active):
                deltas = await active.finished()
        body_text = to_json(_completion(active, deltas, answer, prompt))
        return Response(body_text, 200, {"X-Request-Id": request_id}, "application/json")

    async def _prompt(self, body: fields.Body) -> Prompt:
        messages = check_messages("messages", body.get("messages"))
        variables = body.get("chat_template_kwargs", {})
        if not isinstance(variables, dict):
            raise invalid(
                "chat_template_kwargs", f"chat_template_kwargs must be an object, got {shown(variables)}"
            )
        asks = fields.flag(body, "add_generation_prompt", True)
        text = self._core.render_chat(messages, {**variables, "add_generation_prompt": asks})
        return Prompt(await self._core.encode(text, "messages"), text)


class ChunkWriter:
    """Spells chat.completion.chunk events. All but the new text is spelt once, ahead."""

    def __init__(
        self, active: ActiveRequest, answer: Answer, wishes: fields.StreamWishes, num_choices: int
    ) -> None:
        self._active = active
        self._answer = answer
        self._wishes = wishes
        self._num_choices = num_choices
        self._head = to_json(answer.head("chat.completion.chunk"))[:-1]
        self._end = ',"usage":null}\n\n' if wishes.include_usage else "}\n\n"

    def opening(self) -> bytes:
        role = '{"role":"assistant","content":"","refusal":null}'
        return "".join([self._chunk(i, role) for i in range(self._num_choices)]).encode()

    def delta(self, delta: Delta) -> bytes:
        events = ""
        if delta.text or delta.logprobs:
            logprobs = to_json(self._logprobs(delta)) if self._answer.wants_logprobs else "null"
            events = self._chunk(delta.index, '{"content":' + to_json(delta.text) + "}", logprobs)
        if delta.finish_reason is not None:
            finish = f'"{delta.finish_reason}","stop_reason":{to_json(delta.matched_stop)}'
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

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return _logprobs(visible_logprobs(delta), self._answer.tokenizer)


def _sampling(body: fields.Body) -> Sampling:
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


def _completion(
    active: ActiveRequest, deltas: Sequence[Delta], answer: Answer, prompt: Prompt
) -> dict[str, Any]:
    completion = {
        **answer.head("chat.completion"),
        "choices": [_choice(delta, answer) for delta in deltas],
        "usage": usage_object(active.usage),
    }
    if entries := active.generations[0].prompt_logprobs:
        completion["prompt_logprobs"] = prompt_logprobs(prompt.token_ids, entries, answer.tokenizer)
    return completion


def _choice(delta: Delta, answer: Answer) -> dict[str, Any]:
    logprobs = _logprobs(visible_logprobs(delta), answer.tokenizer) if answer.wants_logprobs else None
    return {
        "index": delta.index,
        "message": {"role": "assistant", "content": delta.text, "refusal": None},
        "logprobs": logprobs,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.matched_stop,
    }


def _logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        token_bytes = list(tokenizer.decode_bytes([token_id]))
        text = tokenizer.token_text(token_id)
        return {"token": text, "logprob": finite(logprob), "bytes": token_bytes}

    content = [
        {**entry(e.token_id, e.logprob), "top_logprobs": [entry(i, value) for i, value in e.top]}
        for e in entries
    ]
    return {"content": content, "refusal": None}
