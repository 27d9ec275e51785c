"""What the generating endpoints have in common: from a request's body to a running request."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response

from services.errors import invalid
from services.frontend.active_request import ActiveRequest
from services.frontend.core import FrontendCore, RequestOptions
from services.frontend.http import fields
from services.frontend.http.body import parse_object, read_body
from services.frontend.http.spelling import to_json
from services.frontend.http.streaming import abort_on_disconnect
from services.frontend.outputs import Delta
from services.frontend.sampling import Sampling
from services.frontend.served_model import ServedModel


@dataclass(frozen=True)
class Call:
    """A request whose shared fields are read."""

    body: fields.Body
    request_id: str
    model: ServedModel
    model_name: str  # as the client calls it
    wishes: fields.StreamWishes
    arrival: float  # seconds since the epoch

    def options(self, prompt_field: str) -> RequestOptions:
        return RequestOptions(
            stream=self.wishes.stream,
            prompt_field=prompt_field,
            arrival=self.arrival,
            cache_salt=fields.salt(self.body),
            priority=fields.priority(self.body),
            skip_special_tokens=fields.flag(self.body, "skip_special_tokens", True),
        )

    def head(self, id: str, kind: str) -> dict[str, Any]:
        """What every object of the answer begins with."""
        return {
            "id": id,
            "object": kind,
            "created": int(self.arrival),
            "model": self.model_name,
            "system_fingerprint": self.model.info.model_fingerprint,
        }


async def read_call(core: FrontendCore, request: Request, max_body_bytes: int) -> Call:
    """Raises ServiceError for a body, a model or a shared field that is wrong."""
    arrival = time.time()
    core.require_serving()
    data = await read_body(request, max_body_bytes)
    await core.turnstile.wait()
    core.require_serving()
    body = parse_object(data)
    name = fields.model_name(body)
    model = core.model(name)
    fields.refuse_unsupported(body)
    return Call(
        body=body,
        request_id=fields.request_id(request),
        model=model,
        model_name=name or model.name,
        wishes=fields.stream_wishes(body),
        arrival=arrival,
    )


def check_prompt_logprobs(call: Call, sampling: Sampling) -> None:
    if call.wishes.stream and sampling.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs is not available together with stream: true")


async def whole_answer(
    call: Call,
    request: Request,
    start: Callable[[], ActiveRequest],
    spell: Callable[[ActiveRequest, list[Delta]], dict[str, Any]],
) -> Response:
    """Waits for all of it; a client that goes away meanwhile aborts it."""
    with start() as active:
        async with abort_on_disconnect(request.receive, active):
            deltas = await active.finished()

    def body() -> str:
        return to_json(spell(active, deltas))

    # Logprobs are many times as large as the text: others get their turn meanwhile.
    prompts = active.generations
    is_large = any(delta.logprobs for delta in deltas) or any(prompt.prompt_logprobs for prompt in prompts)
    content = await asyncio.to_thread(body) if is_large else body()
    return Response(content, 200, {"X-Request-Id": call.request_id}, "application/json")
