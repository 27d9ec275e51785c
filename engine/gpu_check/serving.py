"""The whole engine on random weights: its speed, and that what runs beside a request changes nothing."""

import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from engine.backends.cuda import CudaBackend
from engine.build import LoadedModel, load_model
from engine.gpu_check.parity import Kernels
from engine.gpu_check.plain_memory import PlainMemory
from engine.gpu_check.random_model import LLAMA_1B, RandomCheckpoint
from engine.gpu_check.report import Measurement
from engine.kernels.cuda.launcher import Launcher
from engine.kv_pool import BLOCK_SIZE
from engine.model.config import ModelConfig
from engine.options import EngineOptions
from engine.sequence import Request, SamplingParams, Sequence
from engine.speculation.drafter import DraftSource, DraftTree
from engine.speculation.planner import SpeculationPlanner
from engine.speculation.step_cost import StepCost

SMALL = replace(
    LLAMA_1B, num_layers=4, hidden_size=512, num_heads=8, num_kv_heads=2, intermediate_size=1024,
    vocab_size=4096, max_position=1024,
)  # fmt: skip
NUM_STREAMS = 16
# Float32 rounds differently in another batch, which may turn a near tie.
SAME_SHARE = 0.99


class Sizes(NamedTuple):
    num_requests: int = NUM_STREAMS
    num_prompt: int = 128
    num_output: int = 128


class _Known:
    """A drafter that has seen the output before; in trees it comes behind two branches that are wrong."""

    def __init__(self, outputs: dict[str, list[int]], in_trees: bool) -> None:
        self._outputs = outputs
        self._in_trees = in_trees

    def propose(self, sequence: Sequence, max_depth: int) -> DraftTree | None:
        known = self._outputs[sequence.request.request_id][sequence.num_output :][:max_depth]
        wrong = [0 if token else 1 for token in known]
        before = [wrong[:1], known[:1] + wrong[1:2]] if self._in_trees else []
        return DraftTree.merged([*before, known], DraftSource.PROMPT_LOOKUP) if known else None


def measure(kernels: Kernels, device: torch.device) -> list[Measurement]:
    launcher, sizes = kernels(LLAMA_1B.head_dim).launcher, Sizes()
    return [*_speed(launcher, sizes), *agreement(launcher, SMALL, sizes)]


def agreement(launcher: Launcher, config: ModelConfig, sizes: Sizes) -> list[Measurement]:
    """Shares of tokens that equal those of each request alone, launched or replayed as they may be."""
    loaded = _load(launcher, config, "float32", sizes)
    measurements = []
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        requests = _requests(config, sizes, temperature)
        alone: dict[str, list[int]] = {}
        for request in requests:
            alone |= _serve(loaded, [request])
        ways = {
            "together": loaded,
            "drafted": _drafting(loaded, alone),
            "trees": _drafting(loaded, alone, in_trees=True),
        }
        for way, served in ways.items():
            outputs = _serve(served, requests)
            same = [
                ours == theirs
                for key, tokens in alone.items()
                for ours, theirs in zip(outputs[key], tokens, strict=True)
            ]
            share = sum(same) / len(same)
            measurements.append(
                Measurement(f"parity.serve.{name}.{way}", share, "share of tokens", "higher", SAME_SHARE)
            )
    return measurements


def _speed(launcher: Launcher, sizes: Sizes) -> list[Measurement]:
    loaded = _load(launcher, LLAMA_1B, "bfloat16", sizes)
    measurements = []
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        for count in (1, sizes.num_requests):
            requests = _requests(LLAMA_1B, sizes, temperature)[:count]
            outputs = _serve(loaded, requests)  # the first time does not count
            measurements.append(_rate(f"serve.{name}.streams{count}", loaded, requests))
            if temperature == 0:
                drafting = _drafting(loaded, outputs)
                measurements.append(_rate(f"serve.{name}.streams{count}.drafted", drafting, requests))
    return measurements


def _rate(name: str, loaded: LoadedModel, requests: list[Request]) -> Measurement:
    """Output tokens a second, the prompts' time included."""
    started = time.perf_counter()
    outputs = _serve(loaded, requests)
    seconds = time.perf_counter() - started
    return Measurement(name, sum(map(len, outputs.values())) / seconds, "tokens/s", "higher")


def _load(launcher: Launcher, config: ModelConfig, dtype: str, sizes: Sizes) -> LoadedModel:
    torch.manual_seed(0)
    length = sizes.num_prompt + sizes.num_output
    options = EngineOptions(
        served_name="", device="cuda", dtype=dtype, weights="dtype", max_model_len=length,
        num_blocks=sizes.num_requests * (length // BLOCK_SIZE + 2), memory_fraction=0.0,
        gpu_memory_utilization=0.0, max_num_seqs=sizes.num_requests,
        max_num_batched_tokens=2 * length, max_waiting=sizes.num_requests, num_threads=0,
        speculation=False,
    )  # fmt: skip
    return load_model(RandomCheckpoint(config, launcher.device), options, CudaBackend(launcher, 0.0))


def _drafting(loaded: LoadedModel, outputs: dict[str, list[int]], in_trees: bool = False) -> LoadedModel:
    """Drafts whatever the cost."""
    planner = SpeculationPlanner([_Known(outputs, in_trees)], StepCost([(1, 1.0), (1000, 1.001)]))
    return replace(loaded, planner=planner)


def _requests(config: ModelConfig, sizes: Sizes, temperature: float) -> list[Request]:
    random = np.random.default_rng(0)
    prompts = random.integers(config.vocab_size, size=(sizes.num_requests, sizes.num_prompt)).tolist()
    return [
        Request(
            f"r{i}", prompt,
            SamplingParams(temperature=temperature, top_p=0.9, seed=i, max_tokens=sizes.num_output),
        )
        for i, prompt in enumerate(prompts)
    ]  # fmt: skip


def _serve(loaded: LoadedModel, requests: list[Request]) -> dict[str, list[int]]:
    """Their output tokens."""
    engine = loaded.engine(PlainMemory())
    outputs: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id] += output.token_ids
    return outputs
