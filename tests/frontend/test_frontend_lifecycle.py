"""Clients that go away, slow clients, and what the server does meanwhile."""

import asyncio
import json
import socket

import httpx
import pytest

from services.config import ConfigError, FrontendConfig
from services.frontend.process import Frontend
from services.frontend.text.tokenizer import Tokenizer
from tests.fakes import ScriptedEngine
from tests.frontend.http_tools import chat_body
from tests.frontend_system import MODULE_LOOP, http_client, until

pytestmark = MODULE_LOOP

CHAT = "/v1/chat/completions"


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def send_raw(frontend: Frontend, body: dict[str, object]) -> Connection:
    """A client that the kernel buffers little for."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", frontend.http_port))
    reader, writer = await asyncio.open_connection(sock=client)
    content = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content)
    return reader, writer


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_a_disconnect_aborts(
    frontend: Frontend, engine: ScriptedEngine, stream: bool, num_tokens: int
) -> None:
    engine.pause_after = num_tokens
    reader, writer = await send_raw(frontend, chat_body(stream=stream))
    await until(lambda: len(engine.submits) == 1)
    if stream and num_tokens:
        await reader.readuntil(b" of")
    writer.close()
    await until(lambda: engine.aborted == [engine.submits[0].request_id])
    await until(lambda: frontend.core.num_active == 0)


async def test_300_disconnects_leave_nothing_behind(frontend: Frontend, engine: ScriptedEngine) -> None:
    engine.pause_after = 2
    connections = [await send_raw(frontend, chat_body(stream=i % 2 == 0, n=1 + i % 3)) for i in range(300)]
    await until(lambda: len(engine.submits) == 300)
    for _, writer in connections:
        writer.close()
    await until(lambda: len(engine.aborted) == 300)
    assert sorted(engine.aborted) == sorted(submit.request_id for submit in engine.submits)
    await until(lambda: frontend.core.num_active == 0)


async def test_a_disconnect_while_the_body_is_sent(frontend: Frontend, engine: ScriptedEngine) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", frontend.http_port)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n"
    writer.write(head.encode() + b'{"messages"')
    await writer.drain()
    writer.close()
    async with http_client(frontend) as http:
        assert (await http.post(CHAT, json=chat_body())).status_code == 200
    assert len(engine.submits) == 1


async def test_an_abort_that_races_the_end(
    http: httpx.AsyncClient, frontend: Frontend, engine: ScriptedEngine
) -> None:
    for i in range(20):
        run = asyncio.create_task(http.post(CHAT, json=chat_body(), headers={"x-request-id": f"r{i}"}))
        await until(lambda i=i: len(engine.submits) == i + 1)  # type: ignore[misc]
        for _ in range(i):
            await asyncio.sleep(0)
        frontend.core.abort(f"r{i}")
        answer = (await run).json()
        assert answer["choices"][0]["finish_reason"] in ("stop", "abort")
    assert frontend.core.num_active == 0


async def test_a_slow_reader_holds_nobody_up(
    http: httpx.AsyncClient, frontend: Frontend, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(" word")
    engine.script = lambda submit: ids
    body = chat_body(stream=True, n=25, logprobs=True, top_logprobs=20, max_tokens=100)
    slow_reader, slow_writer = await send_raw(frontend, body)
    await until(lambda: len(engine.submits) == 1)
    for _ in range(5):
        assert (await http.post(CHAT, json=chat_body(max_tokens=5))).status_code == 200
    assert frontend.core.num_active == 1
    rest = await slow_reader.read()
    assert rest.count(b'"finish_reason":"length"') == 25
    assert rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    slow_writer.close()


async def test_a_slow_reader_that_leaves_is_aborted(
    frontend: Frontend, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    engine.script = lambda submit: tokenizer.encode(" word")
    engine.pause_after = 100
    body = chat_body(stream=True, n=25, logprobs=True, top_logprobs=20, max_tokens=400)
    reader, writer = await send_raw(frontend, body)
    await reader.readuntil(b" word")
    writer.transport.abort()
    await until(lambda: frontend.core.num_active == 0)
    await until(lambda: len(engine.aborted) == 1)


async def test_health_during_a_very_large_prompt(frontend: Frontend, engine: ScriptedEngine) -> None:
    """The event loop is never held by the tokenizer: health answers before the prompt is done."""
    text = "This is the year 2024. " * 20_000
    async with http_client(frontend) as http, http_client(frontend) as other:
        big = asyncio.create_task(http.post("/tokenize", json={"prompt": text}))
        num_answers = 0
        while not big.done():
            assert (await other.get("/health")).status_code == 200
            num_answers += 1
        assert (await big).json()["count"] > 50_000
    assert num_answers > 3


async def test_a_port_in_use_is_said(frontend: Frontend) -> None:
    for http_port, grpc_port in ((frontend.http_port, 0), (0, frontend.grpc_port)):
        with pytest.raises(ConfigError, match=str(http_port or grpc_port)):
            await Frontend(FrontendConfig(http_port=http_port, grpc_port=grpc_port)).start()
