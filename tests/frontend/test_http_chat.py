"""POST /v1/chat/completions over a real socket."""

import json
from typing import Any

import httpx

from tests.fakes import ScriptedEngine

USER = [{"role": "user", "content": "What is the capital of France?"}]


async def events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    async with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


async def test_answer(http: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    response = await http.post("/v1/chat/completions", json={"messages": USER})
    assert response.status_code == 200
    body = response.json()
    assert body["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == 37
    assert body["usage"]["completion_tokens"] == 8
    assert engine.submits[0].sampling.max_tokens == 512 - 37


async def test_stream(http: httpx.AsyncClient) -> None:
    got = await events(http, "/v1/chat/completions", {"messages": USER, "stream": True})
    assert got[-1] == "[DONE]"
    chunks = got[:-1]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == "The capital of France is Paris."
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["stop"]
