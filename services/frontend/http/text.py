"""POST /tokenize and POST /detokenize."""

import asyncio

from fastapi import Request, Response

from services.errors import invalid
from services.frontend.core import FrontendCore
from services.frontend.http import fields
from services.frontend.http.body import parse_object, read_body
from services.frontend.http.chat import render
from services.frontend.http.spelling import to_json
from services.frontend.rules import TokenIdList, check_token_ids, shown


class TextEndpoints:
    def __init__(self, core: FrontendCore, max_body_bytes: int) -> None:
        self._core = core
        self._max_body_bytes = max_body_bytes

    async def tokenize(self, request: Request) -> Response:
        """`prompt` or `messages` → tokens, count, max_model_len."""
        body = await self._body(request)
        model = self._core.model(fields.model_name(body))
        text = render(self._core, body) if "messages" in body else body.get("prompt")
        if not isinstance(text, str):
            raise invalid("prompt", f"prompt must be a string, got {shown(text)}")
        token_ids = await self._core.tokenize(text, fields.flag(body, "add_special_tokens", True))
        answer = {"tokens": token_ids, "count": len(token_ids), "max_model_len": model.info.max_model_len}
        return Response(to_json(answer), 200, None, "application/json")

    async def _body(self, request: Request) -> fields.Body:
        data = await read_body(request, self._max_body_bytes)
        await self._core.turnstile.wait()
        return parse_object(data)

    async def detokenize(self, request: Request) -> Response:
        """`tokens` → prompt."""
        body = await self._body(request)
        model = self._core.model(fields.model_name(body))
        token_ids = TokenIdList().check("tokens", body.get("tokens"))
        check_token_ids("tokens", token_ids, model.info.vocab_size)
        text = await asyncio.to_thread(model.tokenizer.decode, token_ids)
        return Response(to_json({"prompt": text}), 200, None, "application/json")
