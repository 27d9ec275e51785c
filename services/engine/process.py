"""The engine process."""

import asyncio
import logging
import sys
from collections.abc import Callable

from engine.build import LoadedModel, load_model
from engine.errors import ModelError
from engine.options import EngineOptions
from engine.speculation.draft_loading import check_vocabulary
from engine.weights.load import open_checkpoint
from nexuskv.v1 import engine_pb2_grpc
from services.config import EngineConfig
from services.engine.memory_client import GrpcMemoryClient
from services.engine.servicer import EngineServicer
from services.engine.worker import EngineWorker
from services.grpc_server import GrpcServer
from services.signals import wait_for_signal
from services.startup import StartError

logger = logging.getLogger(__name__)

# The engine's thread asks for the interpreter after every kernel; the event loop shall not keep it waiting.
SWITCH_INTERVAL_S = 2e-4
SERVICE_NAME = "nexuskv.v1.EngineService"


def engine_options(config: EngineConfig) -> EngineOptions:
    return EngineOptions(
        served_name=config.served_model_name,
        device=config.device,
        dtype=config.dtype,
        weights=config.weights,
        max_model_len=config.max_model_len,
        num_blocks=config.kv_blocks,
        memory_fraction=config.kv_memory_fraction,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_waiting=config.max_waiting,
        num_threads=config.num_threads,
        speculation=config.speculation == "on",
        draft_branches=config.draft_branches,
    )


async def run_engine(config: EngineConfig, on_ready: Callable[[str], None]) -> None:
    """Loads the model, then serves until SIGTERM or SIGINT. `on_ready` hears the address."""
    try:
        loaded = await asyncio.to_thread(_load, config)
    except ModelError as error:
        raise StartError(str(error)) from error
    await serve(config, loaded, on_ready)


def _load(config: EngineConfig) -> LoadedModel:
    checkpoint, draft = open_checkpoint(config.model), None
    if config.draft_model and config.speculation == "on":
        draft = open_checkpoint(config.draft_model)
        check_vocabulary(draft, checkpoint)
    return load_model(checkpoint, engine_options(config), draft=draft)


async def serve(config: EngineConfig, loaded: LoadedModel, on_ready: Callable[[str], None]) -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    memory = GrpcMemoryClient(config.memory_address, config.engine_id)
    servicer = EngineServicer(loaded.info, config.engine_id)
    worker = servicer.worker = EngineWorker(loaded.engine(memory), servicer.deliver)
    server = GrpcServer([SERVICE_NAME])
    engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server.server)
    port = await server.start(config.engine_listen)
    worker.start()
    await server.set_serving(True)
    on_ready(f"{config.engine_listen.rpartition(':')[0]}:{port}")
    stop: asyncio.Future[object] = asyncio.ensure_future(wait_for_signal())
    died: asyncio.Future[object] = asyncio.ensure_future(worker.died)
    await asyncio.wait([stop, died], return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    await server.stop(1.0)
    await worker.stop()
    memory.close()
    if worker.died.done():
        raise worker.died.result()
