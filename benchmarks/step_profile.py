"""Where the time of a step with 16 streams goes, without and with the split into processes.

The default model, 16 requests of 300 tokens, in one process with a memory manager; then the same engine with
a memory manager in a process of its own, in turns. Attention is timed on the same batch by itself.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.figures import figure
from benchmarks.kernels import DIM, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS, batch_of, best_seconds, random_bits
from engine.build import LoadedModel, load_model
from engine.engine import Engine
from engine.kernels import cpu
from engine.memory_client import MemoryClient
from engine.options import EngineOptions
from engine.sequence import Request, SamplingParams
from engine.weights.load import open_checkpoint
from memory_manager import MemoryConfig, MemoryManager
from services.engine.memory_client import GrpcMemoryClient
from tests.in_process_memory import InProcessMemory
from tests.services.memory_process import running_memory_manager

NUM_STREAMS, NUM_PROMPT, NUM_OUTPUT = 16, 300, 64
PAIRS = 5  # of rounds
OPTIONS = EngineOptions(
    served_name="", device="cpu", dtype="bfloat16", weights="auto", max_model_len=0, num_blocks=1024,
    memory_fraction=0.1, gpu_memory_utilization=0.9, max_num_seqs=NUM_STREAMS, max_num_batched_tokens=512,
    max_waiting=100, num_threads=0, speculation=True,
)  # fmt: skip


class _Clock:
    """Adds up the time that calls of some functions take."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds.setdefault(name, []).append(time.perf_counter() - started)

        return call


def _requests(round_number: int, vocab_size: int) -> list[Request]:
    """New prompts each time, so that every round prefills."""
    generator = np.random.default_rng(round_number)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT)
    prompts = generator.integers(100, vocab_size, (NUM_STREAMS, NUM_PROMPT)).tolist()
    return [Request(f"{round_number}-{i}", prompt, sampling) for i, prompt in enumerate(prompts)]


class _Run:
    """An engine that steps while it has work."""

    def __init__(self, loaded: LoadedModel, memory: MemoryClient) -> None:
        self.vocab_size = loaded.info.vocab_size
        self.engine: Engine = loaded.engine(memory)

    def decode_steps(self, round_number: int) -> list[float]:
        """Seconds of each step in which all streams decode; their prompts are computed before."""
        requests = _requests(round_number, self.vocab_size)
        for request in requests:
            once = replace(request.sampling, max_tokens=1)
            self.engine.add(replace(request, request_id=f"before-{request.request_id}", sampling=once))
        while self.engine.has_work:
            self.engine.step()
        for request in requests:
            self.engine.add(request)
        times: list[float] = []
        while self.engine.has_work:
            started = time.perf_counter()
            outputs = self.engine.step()
            if len({output.request_id for output in outputs}) == NUM_STREAMS:
                times.append(time.perf_counter() - started)
        return times


def _attention_seconds() -> float:
    """All layers' attention of a step in the middle of the run."""
    generator = np.random.default_rng(0)
    batch, num_blocks = batch_of([(NUM_PROMPT + NUM_OUTPUT // 2, 1)] * NUM_STREAMS, [])
    pool = random_bits(generator, NUM_LAYERS, 2, num_blocks, NUM_KV_HEADS, 16, DIM)
    q = generator.standard_normal((NUM_STREAMS, NUM_HEADS, DIM), np.float32)
    out = np.empty_like(q)
    tables = batch.block_tables, batch.cu_query_lens, batch.context_lens

    def run() -> None:
        for layer in pool:
            cpu.paged_attention(q, layer[0], layer[1], *tables, DIM**-0.5, out)

    return best_seconds(run)


def _shares(run: _Run, clock: _Clock) -> dict[str, float]:
    """Milliseconds of a decode step by what is done, medians."""
    scheduler, runner = run.engine._scheduler, run.engine._runner
    scheduler._exchange = clock.timed("memory manager", scheduler._exchange)  # type: ignore[method-assign]
    scheduler.schedule = clock.timed("schedule", scheduler.schedule)  # type: ignore[method-assign]
    scheduler.postprocess = clock.timed("output", scheduler.postprocess)  # type: ignore[method-assign]
    runner.run = clock.timed("run", runner.run)  # type: ignore[method-assign]
    model = runner._model
    model.logits = clock.timed("model", model.logits)  # type: ignore[method-assign]
    steps = run.decode_steps(1000)
    medians = {name: 1e3 * statistics.median(times[-len(steps) :]) for name, times in clock.seconds.items()}
    medians["schedule"] -= medians["memory manager"]
    medians["sampling"] = medians.pop("run") - medians["model"]
    return medians


def _split_share(local: _Run, split: _Run) -> float:
    """Of a mean step, what it takes longer with a process of its own for the memory manager.

    The median over pairs of rounds, whose order changes: what else the machine does comes and goes.
    """
    shares = []
    for number in range(PAIRS):
        order = (local, split) if number % 2 == 0 else (split, local)
        means = {run: statistics.fmean(run.decode_steps(2 * number + i)) for i, run in enumerate(order)}
        shares.append(1 - means[local] / means[split])
    return statistics.median(shares)


def measure() -> list[dict[str, Any]]:
    loaded = load_model(open_checkpoint("smollm2-135m-instruct"), OPTIONS)
    local = _Run(loaded, InProcessMemory(MemoryManager(MemoryConfig())))
    with running_memory_manager("--journal", "off") as address:
        client = GrpcMemoryClient(address, "engine-0")
        split = _Run(loaded, client)
        split_share = _split_share(local, split)
        shares = _shares(split, _Clock())
        client.close()
    total = sum(shares.values())
    attention = 1e3 * _attention_seconds()
    figures = [figure(f"step.{name.replace(' ', '_')}_ms", ms, "ms", "lower") for name, ms in shares.items()]
    return [
        figure("step.attention_ms", attention, "ms", "lower"),
        *figures,
        figure("step.overhead_share", 1 - shares["model"] / total, "", "lower", 0.10),
        figure("step.split_share", split_share, "", "lower", 0.05),
    ]
