"""Behaviour of streams that OpenAI's clients rely on."""

import asyncio
from typing import Any

import httpx
import pytest

from nexuskv.v1 import engine_pb2
from services.frontend.process import Frontend
from tests.fakes import ScriptedEngine
from tests.frontend.http_tools import (
    chat_body,
    chat_text,
    check_error,
    choices,
    completion_text,
    finish_reasons,
    stream_events,
    strict_json,
)
from tests.frontend_system import MODULE_LOOP, Eventually

pytestmark = MODULE_LOOP

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "The capital of France is Paris."


def body(path: str, **fields: Any) -> dict[str, Any]:
    return chat_body(**fields) if path == CHAT else {"prompt": "Hi", **fields}


def text_of(path: str, events: list[Any]) -> str:
    return chat_text(events) if path == CHAT else completion_text(events)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_200_streams_end_with_one_finish_reason_each(http: httpx.AsyncClient, path: str) -> None:
    limits = httpx.Limits(max_connections=50)
    async with httpx.AsyncClient(base_url=http.base_url, timeout=60, limits=limits, trust_env=False) as many:
        runs = [stream_events(many, path, body(path, stream=True, max_tokens=1 + i % 12)) for i in range(200)]
        answers = await asyncio.gather(*runs)
    for i, events in enumerate(answers):
        assert events[-1] == "[DONE]"
        assert "[DONE]" not in events[:-1]
        assert finish_reasons(events) == ["length" if 1 + i % 12 < 8 else "stop"]
        assert choices(events)[-1]["finish_reason"] is not None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_every_choice_finishes_once(http: httpx.AsyncClient, path: str) -> None:
    events = await stream_events(http, path, body(path, stream=True, n=3))
    for index in range(3):
        assert finish_reasons(events, index) == ["stop"]
    assert {c["index"] for e in events[:-1] for c in e["choices"]} == {0, 1, 2}


async def test_the_role_comes_first(http: httpx.AsyncClient) -> None:
    events = await stream_events(http, CHAT, chat_body(stream=True, n=2))
    for index in range(2):
        first, *rest = choices(events, index)
        assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert all("role" not in c["delta"] for c in rest)
    assert {e["object"] for e in events[:-1]} == {"chat.completion.chunk"}
    assert len({(e["id"], e["created"], e["model"]) for e in events[:-1]}) == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_usage_comes_last_when_asked_for(http: httpx.AsyncClient, path: str) -> None:
    wish = {"include_usage": True}
    *chunks, last, done = await stream_events(http, path, body(path, stream=True, stream_options=wish))
    assert done == "[DONE]"
    assert last["choices"] == []
    whole = (await http.post(path, json=body(path))).json()
    assert last["usage"] == whole["usage"]
    assert last["usage"]["completion_tokens"] == 8
    assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 8
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}
    assert all(chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_no_usage_unless_asked_for(http: httpx.AsyncClient, path: str) -> None:
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        events = await stream_events(http, path, body(path, stream=True, stream_options=options))
        assert all("usage" not in e and e["choices"] for e in events[:-1])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_continuous_usage(http: httpx.AsyncClient, path: str) -> None:
    wish = {"include_usage": True, "continuous_usage_stats": True}
    events = await stream_events(http, path, body(path, stream=True, stream_options=wish))
    counts = [e["usage"]["completion_tokens"] for e in events[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 8


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("max_tokens", range(1, 11))
async def test_joined_deltas_are_the_unstreamed_text(
    http: httpx.AsyncClient, path: str, max_tokens: int
) -> None:
    events = await stream_events(http, path, body(path, stream=True, max_tokens=max_tokens))
    choice = (await http.post(path, json=body(path, max_tokens=max_tokens))).json()["choices"][0]
    whole = choice["message"]["content"] if path == CHAT else choice["text"]
    assert text_of(path, events) == whole
    assert TEXT.startswith(whole)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_wrong_field_is_an_error_response_not_an_event(http: httpx.AsyncClient, path: str) -> None:
    response = await http.post(path, json=body(path, stream=True, n=0))
    assert check_error(response, 400)["param"] == "n"
    assert response.headers["content-type"] == "application/json"


async def test_a_refusal_of_the_engine_is_an_error_response(
    http: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    engine.rejection = engine_pb2.Rejected(
        reason=engine_pb2.Rejected.REASON_QUEUE_FULL, message="the queue is full", retry_after_ms=2500
    )
    for stream in (True, False):
        response = await http.post(CHAT, json=chat_body(stream=stream))
        assert check_error(response, 429)["message"] == "the queue is full"
        assert response.headers["retry-after"] == "3"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_the_engine_dies_in_the_middle(
    http: httpx.AsyncClient, frontend: Frontend, engine: ScriptedEngine, path: str
) -> None:
    engine.pause_after = 3
    async with http.stream("POST", path, json=body(path, stream=True)) as response:
        lines = []
        async for line in response.aiter_lines():
            if line:
                lines.append(line)
            if " of" in line:
                engine.hang_up()
    assert response.headers["connection"] == "close"
    events = [strict_json(line.removeprefix("data: ")) for line in lines]
    *chunks, last = events
    assert last["error"]["code"] == "engine_lost"
    assert text_of(path, chunks) == "The capital of"
    assert finish_reasons(chunks) == []


async def test_the_socket_closes_after_an_error(
    frontend: Frontend, engine: ScriptedEngine, eventually: Eventually
) -> None:
    engine.pause_after = 3
    reader, writer = await asyncio.open_connection("127.0.0.1", frontend.http_port)
    content = b'{"messages":[{"role":"user","content":"Hi"}],"stream":true}'
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content)
    await reader.readuntil(b" of")
    engine.hang_up()
    rest = await reader.read()
    assert b'{"error"' in rest
    assert b"[DONE]" not in rest
    assert rest.endswith(b"0\r\n\r\n")
    writer.close()


async def test_an_aborted_stream_ends_by_itself(
    http: httpx.AsyncClient, frontend: Frontend, engine: ScriptedEngine, eventually: Eventually
) -> None:
    engine.pause_after = 3
    run = asyncio.create_task(
        http.post(CHAT, json=chat_body(stream=True), headers={"x-request-id": "stop-me"})
    )
    await eventually(lambda: len(engine.submits) == 1)
    assert frontend.core.abort("stop-me")
    text = (await run).text
    assert '"finish_reason":"abort"' in text
    assert text.endswith("data: [DONE]\n\n")
    assert not frontend.core.abort("stop-me")


async def test_an_abort_before_the_first_token_still_echoes(
    http: httpx.AsyncClient, frontend: Frontend, engine: ScriptedEngine, eventually: Eventually
) -> None:
    engine.pause_after = 0
    wish = {"prompt": "one two", "echo": True, "logprobs": 1}
    for number, stream in enumerate((False, True), 1):
        run = asyncio.create_task(
            http.post(COMPLETIONS, json={**wish, "stream": stream}, headers={"x-request-id": "early"})
        )
        await eventually(lambda number=number: len(engine.submits) == number)  # type: ignore[misc]
        assert frontend.core.abort("early")
        answer = await run
        assert answer.status_code == 200
        assert '"text":"one two"' in answer.text
        assert '"finish_reason":"abort"' in answer.text
