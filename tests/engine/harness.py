"""An engine with the hash model and a real memory manager in one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.engine import Engine
from engine.memory_client import MemoryClient
from engine.options import EngineOptions
from engine.outputs import SequenceOutput
from engine.runner import ModelRunner
from engine.scheduler import SchedulerLimits
from engine.sequence import FinishReason, Request, SamplingParams
from engine.speculation.drafter import Drafter
from engine.speculation.planner import SpeculationPlanner
from engine.speculation.step_cost import StepCost
from memory_manager import MemoryConfig, MemoryManager
from tests.engine.hash_model import HashModel, small_pool
from tests.in_process_memory import InProcessMemory

MAX_STEPS = 20_000


@dataclass
class Finished:
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    num_cached: int | None = None
    error: str = ""
    logprobs: list[float] = field(default_factory=list)
    num_accepted: int = 0


class Harness:
    def __init__(
        self,
        num_blocks: int = 64,
        max_num_seqs: int = 8,
        budget: int = 64,
        max_waiting: int = 10_000,
        drafters: Sequence[Drafter] = (),
        memory_config: MemoryConfig | None = None,
        memory: Callable[[MemoryManager], MemoryClient] = InProcessMemory,
    ) -> None:
        self.manager = MemoryManager(memory_config or MemoryConfig())
        self.num_blocks = num_blocks
        limits = SchedulerLimits(num_blocks, max_num_seqs, budget, max_waiting, num_blocks * 16)
        self.memory = memory(self.manager)
        # Rows cost next to nothing, so everything that is proposed is verified.
        cost = StepCost([(1, 1.0), (1000, 1.001)])
        planner = SpeculationPlanner(drafters, cost) if drafters else None
        runner = ModelRunner(HashModel(), small_pool(num_blocks))
        self.engine = Engine(runner, self.memory, limits, "hash-model", planner)
        self.choices: dict[tuple[str, int], Finished] = {}

    def step(self) -> list[SequenceOutput]:
        outputs = self.engine.step()
        if isinstance(self.memory, InProcessMemory):
            assert self.memory.refusals == []
        for output in outputs:
            choice = self.choices.setdefault((output.request_id, output.index), Finished())
            assert choice.reason is None, "an output after the terminal one"
            assert output.num_accepted_tokens <= min(output.num_draft_tokens, len(output.token_ids))
            choice.tokens += output.token_ids
            choice.num_accepted += output.num_accepted_tokens
            if output.logprobs is not None:
                choice.logprobs += output.logprobs.chosen.tolist()
            choice.reason, choice.error = output.finish_reason, output.error
            if output.num_cached_tokens is not None:
                choice.num_cached = output.num_cached_tokens
        return outputs

    def run(self, *requests: Request) -> dict[tuple[str, int], Finished]:
        for request in requests:
            self.engine.add(request)
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                return self.choices
            self.step()
        raise AssertionError("the engine does not come to an end")

    def blocks_in_use(self) -> int:
        stats = self.manager.stats().engines[0]
        return stats.num_blocks - stats.num_free - stats.num_evictable

    def assert_idle_and_clean(self) -> None:
        assert self.manager.check_integrity() == []
        assert self.blocks_in_use() == 0
        assert self.manager.stats().engines[0].num_sequences == 0


def request(
    name: str, prompt: list[int], num_choices: int = 1, priority: int = 0, **sampling: object
) -> Request:
    defaults: dict[str, object] = {"max_tokens": 20, "temperature": 0.0}
    params = SamplingParams(**{**defaults, **sampling})  # type: ignore[arg-type]
    return Request(name, prompt, params, num_choices=num_choices, priority=priority)


def engine_options(**changes: Any) -> EngineOptions:
    """Of a small engine on the CPU."""
    small = EngineOptions(
        served_name="", device="cpu", dtype="bfloat16", weights="auto", max_model_len=0,
        num_blocks=24, memory_fraction=0.1,
        gpu_memory_utilization=0.9, max_num_seqs=4, max_num_batched_tokens=24, max_waiting=10,
        num_threads=0, speculation=True,
    )  # fmt: skip
    return replace(small, **changes)
