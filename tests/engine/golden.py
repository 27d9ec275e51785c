"""The golden prompts of the default model, forced and free, in every mode that an engine has."""

import json
import random
from collections.abc import Sequence as Rows
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine import kv_pool
from engine.batch import ScheduledSequence, build_batch
from engine.engine import Engine
from engine.kv_pool import BLOCK_SIZE, KVPool
from engine.metrics import EngineMetrics
from engine.model.cpu_decoder import CpuDecoder
from engine.runner import ModelRunner
from engine.scheduler import SchedulerLimits
from engine.sequence import Request, SamplingParams, Sequence
from engine.speculation.planner import SpeculationPlanner
from engine.speculation.prompt_lookup import PromptLookup
from engine.speculation.shared_index import SharedIndex
from engine.speculation.step_cost import StepCost
from engine.weights.load import open_checkpoint
from memory_manager import MemoryConfig, MemoryManager
from tests.in_process_memory import InProcessMemory

Case = dict[str, Any]
# Prompts and greedy outputs computed by the transformers library in float32.
CASES: list[Case] = json.loads((Path(__file__).parents[1] / "data" / "greedy_golden.json").read_text())[
    "cases"
]
MAX_POSITION = 512
NUM_BLOCKS = 512
NUM_SEQUENCES = 32


class Mode(NamedTuple):
    name: str
    budget: int = 512  # tokens a step
    cached: bool = False  # the prompts are in the cache
    speculation: bool = False
    neighbours: bool = False  # 31 other sequences run at the same time


MODES = (
    Mode("alone"),
    Mode("chunked", budget=16),
    Mode("cached", cached=True),
    Mode("speculation", cached=True, speculation=True),
    Mode("neighbours", neighbours=True),
    Mode("everything", budget=64, cached=True, speculation=True, neighbours=True),
)


class Run(NamedTuple):
    outputs: list[list[int]]  # of each prompt
    metrics: EngineMetrics


class Golden:
    """The default model in one dtype."""

    def __init__(self, dtype: torch.dtype, weights: str = "dtype") -> None:
        checkpoint = open_checkpoint("smollm2-135m-instruct")
        self._model = CpuDecoder(checkpoint, dtype, MAX_POSITION, weights)
        self._dtype = dtype

    def forced_misses(self, cases: Rows[Case], chunk: int = MAX_POSITION) -> list[float]:
        """The reference's top-2 margins where our likeliest token behind its own tokens is another."""
        misses = []
        for case in cases:
            prompt, output = case["prompt_token_ids"], case["output_token_ids"]
            likeliest = self._likeliest(prompt + output[:-1], chunk)[len(prompt) - 1 :]
            margins = zip(likeliest, output, case["top2_margin"], strict=True)
            misses += [margin for ours, reference, margin in margins if ours != reference]
        return misses

    def run(self, cases: Rows[Case], mode: Mode) -> Run:
        """What an engine says to each prompt, as many tokens as the reference."""
        engine = self._engine(mode)
        found: dict[str, list[int]] = {}

        def run(requests: list[Request]) -> None:
            for request in requests:
                engine.add(request)
            while engine.has_work:
                for output in engine.step():
                    found.setdefault(output.request_id, []).extend(output.token_ids)

        for again in (False, True) if mode.cached else (False,):
            requests = [_request(case, i, mode, again) for i, case in enumerate(cases)]
            if mode.neighbours:
                run([*requests, *_others(NUM_SEQUENCES - len(requests))])
            else:
                for request in requests:
                    run([request])
        return Run([found[request.request_id] for request in requests], engine.metrics)

    def _likeliest(self, tokens: list[int], chunk: int) -> list[int]:
        kv = self._kv(MAX_POSITION // BLOCK_SIZE)
        # With prompt logprobs asked for, every row has logits.
        sequence = Sequence(Request("r", tokens, SamplingParams(num_prompt_logprobs=0)), 0, 0)
        sequence.block_table = list(reversed(range(-(-len(tokens) // BLOCK_SIZE))))
        likeliest: list[int] = []
        for start in range(0, len(tokens), chunk):
            item = ScheduledSequence(sequence, start, min(chunk, len(tokens) - start))
            likeliest += self._model.logits(build_batch((item,)), kv).argmax(-1).tolist()
        return likeliest

    def _engine(self, mode: Mode) -> Engine:
        limits = SchedulerLimits(NUM_BLOCKS, NUM_SEQUENCES, mode.budget, max_model_len=MAX_POSITION)
        # Rows are said to cost next to nothing, so everything that is proposed is verified.
        cost = StepCost([(1, 1.0), (1000, 1.001)])
        planner = SpeculationPlanner([SharedIndex(), PromptLookup()], cost) if mode.speculation else None
        memory = InProcessMemory(MemoryManager(MemoryConfig()))
        runner = ModelRunner(self._model, self._kv(NUM_BLOCKS))
        return Engine(runner, memory, limits, "golden", planner)

    def _kv(self, num_blocks: int) -> KVPool:
        c = self._model.config
        return kv_pool.allocate(c.num_layers, num_blocks, c.num_kv_heads, c.head_dim, self._dtype)


def share_agreed(outputs: Rows[Rows[int]], cases: Rows[Case]) -> float:
    """Tokens before each output's first divergence from the reference, of all tokens."""
    agreed = 0
    for ours, case in zip(outputs, cases, strict=True):
        equal = [a == b for a, b in zip(ours, case["output_token_ids"], strict=False)]
        agreed += equal.index(False) if False in equal else len(equal)
    return agreed / num_tokens(cases)


def num_tokens(cases: Rows[Case]) -> int:
    return sum(len(case["output_token_ids"]) for case in cases)


def _request(case: Case, i: int, mode: Mode, again: bool) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=len(case["output_token_ids"]))
    # Nothing is shared between salts.
    salt = "" if mode.cached else str(i)
    return Request(f"{i}-{again}", case["prompt_token_ids"], sampling, salt=salt)


def _others(count: int) -> list[Request]:
    rng = random.Random(count)
    sampling = SamplingParams(temperature=0.0, max_tokens=24)
    return [Request(f"other-{i}", rng.choices(range(1000), k=40), sampling) for i in range(count)]
