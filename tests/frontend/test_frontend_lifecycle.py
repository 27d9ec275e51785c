"""Clients that go away, peers that go away, and going away oneself."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator

import grpc
import httpx
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nexuskv.v1 import engine_pb2
from services.config import ConfigError, FrontendConfig
from services.frontend import health_probe
from services.frontend.process import Frontend
from services.frontend.text.tokenizer import Tokenizer
from tests.fakes import ScriptedEngine
from tests.frontend.http_tools import chat_body, check_error, strict_json
from tests.frontend_system import MODULE_LOOP, frontend_for, http_client, serving, until

pytestmark = MODULE_LOOP

CHAT = "/v1/chat/completions"


class Relay:
    """Passes bytes on between a client and a server until it is stalled."""

    def __init__(self) -> None:
        self.is_stalled = False
        self._writers: list[asyncio.StreamWriter] = []

    @contextlib.asynccontextmanager
    async def to(self, address: str) -> AsyncIterator[str]:
        host, _, port = address.rpartition(":")

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection(host, int(port))
            self._writers += [writer, back]
            await asyncio.gather(self._pass(reader, back), self._pass(there, writer))

        server = await asyncio.start_server(connect, "127.0.0.1", 0)
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for writer in self._writers:
            writer.close()
        server.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                if not self.is_stalled:
                    writer.write(data)
            writer.close()


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


class TestPeers:
    """Frontends of their own, whose peers come and go."""

    @pytest_asyncio.fixture(loop_scope="module")
    async def alone(self, load_the_tokenizer_once: None) -> AsyncIterator[Frontend]:
        async with frontend_for("127.0.0.1:1") as frontend:
            yield frontend

    async def test_without_an_engine(self, alone: Frontend) -> None:
        async with http_client(alone) as http:
            assert (await http.get("/health")).status_code == 200
            check_error(await http.get("/ready"), 503)
            for path in (CHAT, "/v1/completions", "/v1/generate/stream", "/tokenize"):
                response = await http.post(path, json=chat_body(prompt="Hi"))
                assert check_error(response, 503)["code"] == "engine_unavailable"
                assert response.headers["retry-after"] == "1"
            check_error(await http.get("/v1/models"), 503)
            telemetry = strict_json((await http.get("/v1/telemetry")).text)
            assert telemetry["engine"] is None
            assert telemetry["ready"] is False
            assert (await http.get("/metrics")).status_code == 200

    async def test_the_engine_comes_back(
        self, info: engine_pb2.GetEngineInfoResponse, load_the_tokenizer_once: None
    ) -> None:
        engine = ScriptedEngine(info, lambda submit: [504, 2])
        engine.pause_after = 1
        async with serving(engine) as address, frontend_for(address) as frontend:
            await frontend.ready()
            async with http_client(frontend) as http:
                running = asyncio.create_task(http.post(CHAT, json=chat_body()))
                await until(lambda: len(engine.submits) == 1)
                engine.hang_up()
                assert check_error(await running, 503)["code"] == "engine_lost"
                await until(lambda: frontend.core.not_ready_reason is None)
                engine.pause_after = 10
                assert (await http.post(CHAT, json=chat_body())).status_code == 200

    async def test_an_engine_that_stops_serving_is_not_ready(
        self, info: engine_pb2.GetEngineInfoResponse, load_the_tokenizer_once: None
    ) -> None:
        engine = ScriptedEngine(info, lambda submit: [504, 2])
        async with serving(engine) as address, frontend_for(address) as frontend:
            await frontend.ready()
            async with (
                grpc.aio.insecure_channel(f"127.0.0.1:{frontend.grpc_port}") as channel,
                http_client(frontend) as http,
            ):
                health = health_pb2_grpc.HealthStub(channel)
                request = health_pb2.HealthCheckRequest(service="nexuskv.v1.InferenceService")
                await until_serving(health, request, health_pb2.HealthCheckResponse.SERVING)
                engine.hang_up()
                await until(lambda: frontend.core.not_ready_reason is not None)
                check_error(await http.get("/ready"), 503)

    async def test_a_silent_engine_is_given_up(
        self,
        info: engine_pb2.GetEngineInfoResponse,
        load_the_tokenizer_once: None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Its connection stands, but nothing comes any more: as with a stopped process."""
        monkeypatch.setattr(health_probe, "INTERVAL_S", 0.01)
        monkeypatch.setattr(health_probe, "DEADLINE_S", 0.2)
        engine = ScriptedEngine(info, lambda submit: [504, 2])
        engine.pause_after = 1
        relay = Relay()
        async with (
            serving(engine) as address,
            relay.to(address) as relayed,
            frontend_for(relayed) as frontend,
            http_client(frontend) as http,
        ):
            await frontend.ready()
            running = asyncio.create_task(http.post(CHAT, json=chat_body(stream=True)))
            await until(lambda: len(engine.submits) == 1)
            relay.is_stalled = True
            text = (await running).text
            assert '"code": "engine_lost"' in text
            assert "[DONE]" not in text
            check_error(await http.post(CHAT, json=chat_body()), 503)
            check_error(await http.get("/ready"), 503)

    async def test_a_model_that_cannot_be_read(
        self, info: engine_pb2.GetEngineInfoResponse, load_the_tokenizer_once: None
    ) -> None:
        other = engine_pb2.GetEngineInfoResponse()
        other.CopyFrom(info)
        other.model_path = "/nowhere/model.gguf"
        engine = ScriptedEngine(other, lambda submit: [504, 2])
        async with serving(engine) as address, frontend_for(address) as frontend:
            await until(lambda: "/nowhere/model.gguf" in (frontend.core.not_ready_reason or ""))
            async with http_client(frontend) as http:
                assert "/nowhere" in check_error(await http.post(CHAT, json=chat_body()), 503)["message"]

    async def test_a_memory_manager_that_is_gone(
        self, info: engine_pb2.GetEngineInfoResponse, load_the_tokenizer_once: None
    ) -> None:
        engine = ScriptedEngine(info, lambda submit: [504, 2])
        async with (
            serving(engine) as address,
            frontend_for(address, memory_address="127.0.0.1:1") as frontend,
        ):
            await until(lambda: "memory manager" in (frontend.core.not_ready_reason or ""))
            async with http_client(frontend) as http:
                check_error(await http.get("/ready"), 503)
                # The engine may still have room for it.
                assert (await http.post(CHAT, json=chat_body())).status_code == 200


class TestDrain:
    async def test_running_streams_finish_and_new_requests_are_refused(
        self, info: engine_pb2.GetEngineInfoResponse, load_the_tokenizer_once: None
    ) -> None:
        engine = ScriptedEngine(info, lambda submit: [504, 3575, 282, 2])
        engine.pause_after = 1
        async with serving(engine) as address:
            async with frontend_for(address, drain_timeout_s=30) as frontend, http_client(frontend) as http:
                await frontend.ready()
                running = asyncio.create_task(http.post(CHAT, json=chat_body(stream=True)))
                await until(lambda: len(engine.submits) == 1)
                stopping = asyncio.create_task(frontend.stop())
                await until(lambda: frontend.core.not_ready_reason is not None)
                check_error(await http.get("/ready"), 503)
                assert check_error(await http.post(CHAT, json=chat_body()), 503)["code"] == "shutting_down"
                assert not stopping.done()
                engine.pause_after = 10
                assert (await running).text.endswith("data: [DONE]\n\n")
                await stopping

    async def test_what_does_not_finish_ends_with_one_error(
        self, info: engine_pb2.GetEngineInfoResponse, load_the_tokenizer_once: None
    ) -> None:
        engine = ScriptedEngine(info, lambda submit: [504, 2])
        engine.pause_after = 1
        async with serving(engine) as address:
            async with frontend_for(address, drain_timeout_s=0.1) as frontend, http_client(frontend) as http:
                await frontend.ready()
                running = asyncio.create_task(http.post(CHAT, json=chat_body(stream=True)))
                await until(lambda: len(engine.submits) == 1)
                await frontend.stop()
                text = (await running).text
                assert '"code": "shutting_down"' in text
                assert 'finish_reason":"' not in text
            await until(lambda: len(engine.aborted) == 1)


async def test_a_port_in_use_is_said(frontend: Frontend) -> None:
    for http_port, grpc_port in ((frontend.http_port, 0), (0, frontend.grpc_port)):
        with pytest.raises(ConfigError, match=str(http_port or grpc_port)):
            await Frontend(FrontendConfig(http_port=http_port, grpc_port=grpc_port)).start()


async def until_serving(health: health_pb2_grpc.HealthStub, request: object, status: object) -> None:
    while (await health.Check(request)).status != status:  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)
