"""Engines and memory managers that come and go, and going away oneself."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nexuskv.v1 import engine_pb2
from services.frontend import health_probe
from services.frontend.process import Frontend
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


async def until_serving(health: health_pb2_grpc.HealthStub, request: object, status: object) -> None:
    while (await health.Check(request)).status != status:  # type: ignore[attr-defined]
        await asyncio.sleep(0.01)


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
        self,
        info: engine_pb2.GetEngineInfoResponse,
        load_the_tokenizer_once: None,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        other = engine_pb2.GetEngineInfoResponse()
        other.CopyFrom(info)
        other.model_path = "/nowhere/model.gguf"
        engine = ScriptedEngine(other, lambda submit: [504, 2])
        async with serving(engine) as address, frontend_for(address) as frontend:
            await until(lambda: "/nowhere/model.gguf" in (frontend.core.not_ready_reason or ""))
            async with http_client(frontend) as http:
                assert "/nowhere" in check_error(await http.post(CHAT, json=chat_body()), 503)["message"]
            # Once, however often it is tried again.
            await asyncio.sleep(1)
            assert sum("/nowhere" in message for message in caplog.messages) == 1

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
