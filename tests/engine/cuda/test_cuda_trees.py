"""Trees of drafts and a model that drafts, mostly on a simulated GPU: the same tokens as on the CPU."""

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import build, kv_pool
from engine.backends import Backend
from engine.backends.cuda import CudaBackend
from engine.batch import Batch, ScheduledSequence, build_batch
from engine.build import LoadedModel, load_model
from engine.kernels.cuda.kernels import CudaKernels
from engine.kernels.cuda.launcher import Launcher
from engine.kv_pool import KVPool
from engine.model.cpu_decoder import CpuDecoder
from engine.model.cuda_decoder import CudaDecoder
from engine.model.cuda_page_mover import CudaPageMover
from engine.page_mover import CpuPageMover, Move
from engine.runner import Model, StepResult
from engine.sequence import Request, SamplingParams, Sequence
from engine.speculation import draft_loading
from engine.speculation.drafter import DraftSource, DraftTree
from engine.speculation.planner import SpeculationPlanner
from engine.speculation.step_cost import StepCost, StepCosts
from engine.weights.load import open_checkpoint
from tests.engine.cuda.simulator import SimulatorLauncher
from tests.engine.cuda.test_cuda_decoder import kernels, make_model
from tests.engine.cuda.test_cuda_engine import NEEDS_GPU, a_gpu, serve, tokens
from tests.engine.harness import engine_options, request

LOOKUP = DraftSource.PROMPT_LOOKUP
CHEAP_ROWS = StepCost([(1, 1.0), (100, 1.001)])
VOCABULARY = 40


@pytest.fixture
def _costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured: whatever may be accepted is worth its rows, and a draft model takes no time."""
    free = StepCost([(1, 1e-6)])
    monkeypatch.setattr(build, "warm_up", lambda *_: StepCosts(CHEAP_ROWS, CHEAP_ROWS))
    monkeypatch.setattr(draft_loading, "warm_up", lambda *_: StepCosts(free, free))


class Known:
    """Drafts what each request will say, three tokens ahead: "tree" behind two branches that are wrong."""

    def __init__(self, outputs: dict[str, list[int]]) -> None:
        self._outputs = outputs

    def propose(self, sequence: Sequence, max_depth: int) -> DraftTree | None:
        name = sequence.request.request_id
        right = self._outputs[name][sequence.num_output :][: min(max_depth, 3)]
        wrong = [(token + 1) % VOCABULARY for token in right]
        if not right:
            return None
        before = [wrong[:2], right[:1] + wrong[1:2]] if name == "tree" else []
        return DraftTree.merged([*before, right], LOOKUP)


def load(directory: Path, backend: Backend | None = None, **options: Any) -> LoadedModel:
    sized = engine_options(dtype="float32", max_num_seqs=3, **options)
    return load_model(open_checkpoint(str(directory)), sized, backend)


@pytest.mark.usefixtures("_costs")
@pytest.mark.parametrize("launcher_of", [SimulatorLauncher, pytest.param(a_gpu, marks=NEEDS_GPU)])
def test_tokens_equal_those_without_drafts_and_those_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher_of: Callable[[], Launcher]
) -> None:
    make_model(tmp_path, "llama")
    moved: list[int] = []
    compact_kv = CudaKernels.compact_kv

    def counted(self: CudaKernels, *arguments: torch.Tensor) -> None:
        moved.append(len(arguments[2]))
        compact_kv(self, *arguments)

    monkeypatch.setattr(CudaKernels, "compact_kv", counted)
    requests = [
        request("tree", [5, 6, 7, 9, 1], max_tokens=9, temperature=1.0),
        request("chain", [3, 1, 4, 1], max_tokens=8),
        # In two chunks, the second beside the drafts of the others.
        request("prefill", [t * 7 % VOCABULARY for t in range(23)], max_tokens=2),
    ]
    on_cpu = load(tmp_path)
    on_gpu = load(tmp_path, CudaBackend(launcher_of(), 0.9), draft_branches=4)
    assert on_gpu.planner is not None

    def outputs(loaded: LoadedModel, planner: SpeculationPlanner | None) -> dict[str, list[int]]:
        served = serve(replace(loaded, planner=planner), requests)
        return {name: tokens(parts) for (name, _), parts in served.items()}

    expected = outputs(on_cpu, None)
    assert outputs(on_gpu, None) == expected
    assert moved == []
    drafting = SpeculationPlanner([Known(expected)], CHEAP_ROWS)
    assert outputs(on_cpu, drafting) == expected

    steps: list[Batch] = []
    run = on_gpu.runner.run

    def noted(batch: Batch) -> StepResult:
        steps.append(batch)
        return run(batch)

    on_gpu.runner.run = noted  # type: ignore[method-assign]
    assert outputs(on_gpu, drafting) == expected
    # Each time nodes 3, 5 and 6 are right, and go where 1, 2 and 3 were.
    assert moved == [3, 3]
    kinds = [[item.draft and item.draft.is_chain for item in batch.scheduled] for batch in steps]
    assert kinds[1] == [False, True, None], "a tree, a chain and a prefill in one step"
    assert steps[1].scheduled[2].num_tokens > 1


def test_a_step_of_a_tree_a_chain_and_a_prefill_gives_the_logits_of_the_cpu(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", num_hidden_layers=1)
    checkpoint = open_checkpoint(str(tmp_path))
    long = [t * 7 % VOCABULARY for t in range(18)]
    tables = ([3, 1], [4], [2])
    drafts = (
        # Its nodes lie in both blocks.
        DraftTree([10, 11, 12, 13, 14, 15], [0, 1, 1, 0, 4, 5], LOOKUP),
        DraftTree.chain([8, 9], LOOKUP),
        None,
    )
    sequences = []
    for prompt, table in zip((long[:14], long[:5], long[:7]), tables, strict=True):
        sequences.append(Sequence(Request("r", prompt, SamplingParams()), 0, 0))
        sequences[-1].block_table = table
    known = build_batch(tuple(ScheduledSequence(s, 0, s.num_tokens - 1) for s in sequences[:2]))
    starts = [(13, 1), (4, 1), (0, 7)]
    mixed = build_batch(
        tuple(
            ScheduledSequence(sequence, *span, draft)
            for sequence, span, draft in zip(sequences, starts, drafts, strict=True)
        )
    )
    assert mixed.tree is not None
    assert mixed.positions[:7].tolist() == [13, 14, 15, 15, 14, 15, 16]
    models: list[Model] = [
        CpuDecoder(checkpoint, torch.float32, 128),
        CudaDecoder(checkpoint, torch.float32, 128, kernels()),
    ]
    answers = []
    for model in models:
        kv = kv_pool.allocate(1, 5, 1, 64, torch.float32)
        with torch.inference_mode():
            model.logits(known, kv)
            answers.append(model.logits(mixed, kv))
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_slots_are_moved_on_both_devices(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # Slot 19 is a source before it is a target; the second sequence moves across blocks.
    moves: Rows[Rows[Move]] = [[(19, 17), (20, 18), (22, 19)], [(64, 31)]]
    ours = KVPool(torch.randn(2, 2, 5, 1, 16, 64).to(dtype))
    theirs = KVPool(ours.pages.clone())
    before = ours.pages.clone()
    CudaPageMover(kernels(), ours).compact(moves)
    CpuPageMover(theirs).compact(moves)
    assert torch.equal(ours.pages, theirs.pages)
    changed = (ours.pages != before).any(-1).any(3).nonzero()[:, 2:]
    assert {(int(block), int(slot)) for block, slot in changed} == {(1, 1), (1, 2), (1, 3), (1, 15)}


def test_the_same_blocks_are_copied_on_both_devices() -> None:
    torch.manual_seed(0)
    ours = KVPool(torch.randn(2, 2, 6, 1, 16, 64))
    theirs, expected = KVPool(ours.pages.clone()), ours.pages[:, :, [0, 4, 2, 4, 4, 2]]
    for mover in (CudaPageMover(kernels(), ours), CpuPageMover(theirs)):
        mover.copy_blocks([4, 4, 2], [1, 3, 5])
        mover.copy_blocks([], [])
    assert torch.equal(ours.pages, expected)
    assert torch.equal(theirs.pages, expected)


@pytest.mark.usefixtures("_costs")
@pytest.mark.parametrize("num_layers", [2, 1], ids=["itself", "another"])
def test_a_model_drafts_on_the_gpu(tmp_path: Path, num_layers: int) -> None:
    make_model(tmp_path / "target", "llama")
    make_model(tmp_path / "draft", "llama", num_hidden_layers=num_layers)
    requests = [request("a", [5, 6, 7, 9, 1], max_tokens=6), request("b", [3, 2, 4, 1], max_tokens=5)]
    expected = serve(replace(load(tmp_path / "target"), planner=None), requests)
    target, draft = (open_checkpoint(str(tmp_path / name)) for name in ("target", "draft"))
    options = engine_options(dtype="float32", max_num_seqs=2)
    loaded = load_model(target, options, CudaBackend(SimulatorLauncher(), 0.9), draft)
    actual = serve(loaded, requests)
    for key, outputs in expected.items():
        assert tokens(actual[key]) == tokens(outputs)
    drafted = [
        output
        for outputs in actual.values()
        for output in outputs
        if output.draft_source is DraftSource.DRAFT_MODEL and output.num_draft_tokens
    ]
    assert drafted
    if num_layers == 2:
        assert all(output.num_accepted_tokens == output.num_draft_tokens for output in drafted)
    assert loaded.planner is not None
    drafter = loaded.planner._draft_model
    assert drafter is not None
    assert drafter.num_free_blocks == loaded.info.limits.num_blocks
