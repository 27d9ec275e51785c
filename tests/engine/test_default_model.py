"""The default model against golden outputs computed by the transformers library in float32."""

from dataclasses import replace

import pytest
import torch

from engine import kv_pool
from engine.engine import Engine
from engine.model.cpu_decoder import CpuDecoder
from engine.runner import ModelRunner
from engine.scheduler import SchedulerLimits
from engine.sequence import Request, SamplingParams, Sequence
from engine.speculation.draft_model import DraftModel
from engine.speculation.drafter import Drafter
from engine.speculation.planner import SpeculationPlanner
from engine.speculation.step_cost import StepCost
from engine.weights.load import open_checkpoint
from memory_manager import MemoryConfig, MemoryManager
from tests.engine.golden import CASES, MODES, Golden, Mode, num_tokens
from tests.engine.liars import LyingDrafter
from tests.in_process_memory import InProcessMemory

SHORT = [CASES[i] for i in (0, 3, 4)]


@pytest.fixture(scope="module")
def float32() -> Golden:
    return Golden(torch.float32)


def test_float32_is_identical(float32: Golden) -> None:
    assert float32.forced_misses(CASES) == []


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_float32_is_identical_in_every_mode(float32: Golden, mode: Mode) -> None:
    run = float32.run(SHORT, mode)
    assert run.outputs == [case["output_token_ids"] for case in SHORT]
    # The mode is what it says.
    assert (run.metrics.num_hit_tokens > 0) == mode.cached
    assert (run.metrics.num_accepted_tokens > 0) == mode.speculation


@pytest.mark.parametrize(("drafting", "longest"), [("chains", 40), ("trees", 40), ("model", 10)])
def test_float32_is_identical_whatever_is_drafted(drafting: str, longest: int) -> None:
    """All prompts with outputs up to `longest` tokens at once."""
    cases = {str(i): case for i, case in enumerate(CASES) if len(case["output_token_ids"]) <= longest}
    model = CpuDecoder(open_checkpoint("smollm2-135m-instruct"), torch.float32, 512)
    c = model.config
    kv = kv_pool.allocate(c.num_layers, 128, c.num_kv_heads, c.head_dim, torch.float32)

    def truth(sequence: Sequence) -> list[int]:
        output: list[int] = cases[sequence.request.request_id]["output_token_ids"]
        return output[sequence.num_output :]

    drafters: dict[str, Drafter] = {
        "chains": LyingDrafter(3, truth),
        "trees": LyingDrafter(3, truth, max_branches=4),
        "model": DraftModel(model, replace(kv, pages=kv.pages.clone()), c.vocab_size, 512),
    }
    planner = SpeculationPlanner([drafters[drafting]], StepCost([(1, 1.0), (1000, 1.001)]))
    memory = InProcessMemory(MemoryManager(MemoryConfig()))
    engine = Engine(ModelRunner(model, kv), memory, SchedulerLimits(128), "float32", planner)
    outputs: dict[str, list[int]] = {name: [] for name in cases}
    for name, case in cases.items():
        sampling = SamplingParams(temperature=0, max_tokens=len(case["output_token_ids"]))
        engine.add(Request(name, case["prompt_token_ids"], sampling))
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id] += output.token_ids
    assert outputs == {name: case["output_token_ids"] for name, case in cases.items()}
    drafted, accepted = engine.metrics.num_draft_tokens, engine.metrics.num_accepted_tokens
    assert accepted > 0.3 * sum(map(len, outputs.values()))
    assert (accepted == drafted) == (drafting == "model"), "the same model is always right"


@pytest.mark.parametrize("weights", ["auto", "dtype"])
def test_bfloat16_misses_only_near_ties(weights: str) -> None:
    misses = Golden(torch.bfloat16, weights).forced_misses(CASES)
    assert len(misses) <= 0.015 * num_tokens(CASES)
    assert all(margin <= 0.25 for margin in misses)


def test_int8_weights_agree() -> None:
    misses = Golden(torch.bfloat16, "int8").forced_misses(CASES)
    assert len(misses) <= 0.05 * num_tokens(CASES)
    assert all(margin <= 1.0 for margin in misses)


def test_the_checkpoint_is_described() -> None:
    config = open_checkpoint("smollm2-135m-instruct").config
    assert config.eos_token_ids == (2,)
    assert (config.num_layers, config.hidden_size, config.max_position) == (30, 576, 8192)
