"""What no honest client sends. The server answers with an error or hangs up, and lives."""

import asyncio
import json
import logging
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.errors import ServiceError
from services.frontend.chat_messages import check_messages
from services.frontend.http import body, server
from services.frontend.http.body import parse_object
from services.frontend.http.chat import read_sampling
from services.frontend.http.completions import split_prompts
from services.frontend.http.fields import refuse_unsupported, stream_wishes
from services.frontend.process import Frontend
from services.frontend.turnstile import Turnstile
from tests.fakes import ScriptedEngine
from tests.frontend.http_tools import chat_body, check_error, strict_json
from tests.frontend_system import MODULE_LOOP, Eventually

CHAT = "/v1/chat/completions"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def exchange(frontend: Frontend, data: bytes) -> bytes:
    """Sends bytes, hangs up, answers what came back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", frontend.http_port)
    writer.write(data)
    try:
        await writer.drain()
        return await asyncio.wait_for(reader.read(4096), 0.3)
    except (TimeoutError, ConnectionError):
        return b""
    finally:
        writer.close()


@MODULE_LOOP
@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00" * 100,
        b"GET\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"GET /h\xc3\xa9alth HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET http:// HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
        HEAD + b"content-length: -5\r\n\r\n{}",
        HEAD + b"content-length: 99999999999999999999\r\n\r\n{}",
        HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
        HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
        HEAD + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        HEAD + b"content-length: 100\r\n\r\n{",
        HEAD + b"expect: 100-continue\r\ncontent-length: 2\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 1000,
    ],
)
async def test_bytes_that_are_not_http(frontend: Frontend, http: httpx.AsyncClient, data: bytes) -> None:
    answer = await exchange(frontend, data)
    if answer.startswith(b"HTTP/1.1 4"):
        body = answer.partition(b"\r\n\r\n")[2]
        assert set(strict_json(body.decode())) == {"error"}
    assert (await http.get("/health")).status_code == 200


@MODULE_LOOP
async def test_a_head_without_end(
    frontend: Frontend, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_HEAD_BYTES", 10_000)
    answer = await exchange(frontend, b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"b" * 200_000)
    assert answer.startswith(b"HTTP/1.1 400") or answer == b""
    ok = await exchange(frontend, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 3)
    assert b"HTTP/1.1 200" in ok


@MODULE_LOOP
async def test_pipelined_requests_are_answered_in_order(frontend: Frontend) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", frontend.http_port)
    content = json.dumps(chat_body(max_tokens=1)).encode()
    request = HEAD + b"content-length: %d\r\n\r\n" % len(content) + content
    writer.write(request * 3 + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    assert answer.count(b"HTTP/1.1 200") == 4
    assert answer.endswith(b'{"status":"ok"}')
    writer.close()


@MODULE_LOOP
async def test_a_disconnect_is_noticed_behind_pipelined_requests(
    frontend: Frontend, engine: ScriptedEngine, eventually: Eventually
) -> None:
    engine.pause_after = 2
    _, writer = await asyncio.open_connection("127.0.0.1", frontend.http_port)
    content = json.dumps(chat_body(max_tokens=400)).encode()
    writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(content) + content)
    await eventually(lambda: len(engine.submits) == 1)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 3)
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await eventually(lambda: engine.aborted == [engine.submits[0].request_id])


@MODULE_LOOP
async def test_more_requests_than_may_wait_on_a_connection(
    frontend: Frontend, engine: ScriptedEngine
) -> None:
    engine.pause_after = 0
    reader, writer = await asyncio.open_connection("127.0.0.1", frontend.http_port)
    content = json.dumps(chat_body()).encode()
    writer.write((HEAD + b"content-length: %d\r\n\r\n" % len(content) + content) * (server.MAX_PIPELINED + 1))
    assert b"Too many requests wait" in await reader.read()
    writer.close()


@MODULE_LOOP
async def test_trailers_are_not_kept(frontend: Frontend) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", frontend.http_port)
    content = json.dumps(chat_body(max_tokens=1)).encode()
    writer.write(HEAD + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n")
    writer.write(b"%x\r\n%b\r\n0\r\n" % (len(content), content))
    connections: set[Any] = frontend._http._server.server_state.connections  # type: ignore[union-attr]
    for i in range(2000):
        writer.write(b"x%d: y\r\n" % i)
    await writer.drain()
    await asyncio.sleep(0.05)
    assert max(len(connection.headers) for connection in connections) < 20
    writer.write(b"\r\n")
    assert b"200 OK" in await reader.read()
    writer.close()


@MODULE_LOOP
async def test_a_body_that_does_not_come(frontend: Frontend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "SILENCE_S", 0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", frontend.http_port)
    writer.write(HEAD + b"content-length: 100\r\n\r\n{")
    assert b"HTTP/1.1 408" in await reader.read(4096)
    writer.close()


@MODULE_LOOP
async def test_a_connection_on_which_nothing_is_said(
    frontend: Frontend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend._http._server.config, "timeout_keep_alive", 0.2)  # type: ignore[union-attr]
    reader, writer = await asyncio.open_connection("127.0.0.1", frontend.http_port)
    assert await reader.read() == b""
    writer.close()


@MODULE_LOOP
async def test_too_long_lists(http: httpx.AsyncClient) -> None:
    lists = {"logit_bias": {str(i): 1 for i in range(20_000)}, "stop_token_ids": [1] * 2000}
    for name, value in lists.items():
        error = check_error(await http.post(CHAT, json=chat_body(**{name: value})), 400)
        assert (error["param"], "at most" in error["message"]) == (name, True)
    check_error(await http.post("/v1/completions", json={"prompt": "x", "best_of": True}), 400)
    check_error(await http.post(CHAT, json=chat_body(n=101)), 400)
    name = check_error(await http.post(CHAT, json=chat_body(model="m" * 9000)), 404)["message"]
    assert len(name) < 300


@MODULE_LOOP
async def test_too_many_messages_and_parts(http: httpx.AsyncClient) -> None:
    message = {"role": "user", "content": "x"}
    check_error(await http.post(CHAT, json={"messages": [message] * 2049}), 400)
    parts = [{"type": "text", "text": "x"}] * 2049
    check_error(await http.post(CHAT, json={"messages": [{"role": "user", "content": parts}]}), 400)


@MODULE_LOOP
async def test_template_variables_cannot_replace_the_messages(
    http: httpx.AsyncClient, engine: ScriptedEngine
) -> None:
    for variables in ({}, {"messages": [], "self": 1, "bos_token": "x", "unknown": [1]}):
        assert (await http.post(CHAT, json=chat_body(chat_template_kwargs=variables))).status_code == 200
    assert engine.submits[0].prompt_token_ids == engine.submits[1].prompt_token_ids
    check_error(await http.post(CHAT, json=chat_body(chat_template_kwargs=[])), 400)


@MODULE_LOOP
async def test_random_requests_never_break_the_server(
    http: httpx.AsyncClient, engine: ScriptedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Every answer is a 200 or a 4xx with the error shape; nothing is logged as a bug."""
    rng = random.Random(7)
    values: list[Any] = [
        None,
        True,
        -1,
        0,
        1,
        3.5,
        1e308,
        10**40,
        "",
        "x",
        "👩‍🚀",
        [],
        [1],
        ["a"],
        {},
        {"a": 1},
    ]
    names = ["prompt", "messages", "model", "n", "stop", "stream", "logprobs", "top_logprobs", "max_tokens"]
    names += ["temperature", "logit_bias", "stream_options", "echo", "response_format", "tools", "best_of"]
    with caplog.at_level(logging.ERROR):
        for _ in range(300):
            fields = {name: rng.choice(values) for name in rng.sample(names, rng.randint(0, 5))}
            base: dict[str, Any] = rng.choice([chat_body(), {"prompt": "Hi"}, {}])
            path = rng.choice([CHAT, "/v1/completions", "/v1/generate/stream", "/tokenize", "/detokenize"])
            response = await http.post(path, json={**base, "max_tokens": 2, **fields})
            if response.status_code != 200:
                assert 400 <= response.status_code < 500, response.text
                check_error(response, response.status_code)
    assert caplog.records == []


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELD_NAMES = st.sampled_from(
    ["temperature", "n", "stop", "logit_bias", "logprobs", "top_logprobs", "stream_options", "tools"]
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(body=st.dictionaries(FIELD_NAMES, JSON_VALUES), value=JSON_VALUES)
def test_checks_raise_service_errors_only(body: dict[str, Any], value: Any) -> None:
    checks = [
        lambda: read_sampling(body),
        lambda: refuse_unsupported(body),
        lambda: stream_wishes(body),
        lambda: split_prompts(value),
        lambda: check_messages("messages", value),
        lambda: check_messages("messages", [{"role": "user", "content": value}]),
    ]
    for check in checks:
        if (error := refusal(check)) is not None:
            assert error.http_status == 400
            assert error.field
            error.message.encode()


def refusal(check: Callable[[], object]) -> ServiceError | None:
    try:
        check()
    except ServiceError as error:
        return error
    return None


@settings(max_examples=300)
@given(data=st.binary(max_size=40) | st.text(max_size=40).map(lambda text: json.dumps(text).encode()))
def test_bodies_raise_service_errors_only(data: bytes) -> None:
    if (error := refusal(lambda: parse_object(data))) is not None:
        assert error.http_status == 400
        error.message.encode()


@MODULE_LOOP
async def test_the_turnstile_lets_one_through_per_turn() -> None:
    turnstile, order = Turnstile(), list[int]()

    async def pass_through(number: int) -> None:
        await turnstile.wait()
        order.append(number)

    tasks = [asyncio.create_task(pass_through(i)) for i in range(5)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    counts = []
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        counts.append(len(order))
    assert order == [0, 2, 3, 4]
    assert all(after - before <= 1 for before, after in pairwise(counts))
    await asyncio.wait_for(turnstile.wait(), 5)
