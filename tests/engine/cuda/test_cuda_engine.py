"""The whole engine on a GPU, mostly a simulated one: graphs, sampling, the same tokens as on the CPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import warm_up
from engine.backends import Backend
from engine.backends.cuda import CudaBackend
from engine.build import LoadedModel, load_model
from engine.errors import ModelError
from engine.kernels.cuda.launcher import GpuLauncher, Launcher
from engine.model import cuda_graphs
from engine.outputs import SequenceOutput
from engine.sequence import Request
from engine.speculation.planner import SpeculationPlanner
from engine.speculation.prompt_lookup import PromptLookup
from engine.speculation.step_cost import StepCost
from engine.weights.load import open_checkpoint
from memory_manager import MemoryConfig, MemoryManager
from tests.engine.cuda.simulator import SimulatorLauncher
from tests.engine.cuda.test_cuda_decoder import make_model
from tests.engine.harness import engine_options, request
from tests.in_process_memory import InProcessMemory


def load(directory: Path, backend: Backend | None = None) -> LoadedModel:
    """Drafts whatever repeats, however long steps take."""
    planner = SpeculationPlanner([PromptLookup()], StepCost([(1, 1.0), (100, 1.01)]))
    return replace(
        load_model(open_checkpoint(str(directory)), engine_options(dtype="float32"), backend), planner=planner
    )


def serve(loaded: LoadedModel, requests: list[Request]) -> dict[tuple[str, int], list[SequenceOutput]]:
    """Outputs by request and choice."""
    manager = MemoryManager(MemoryConfig())
    engine = loaded.engine(InProcessMemory(manager))
    for one in requests:
        engine.add(one)
    outputs: dict[tuple[str, int], list[SequenceOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault((output.request_id, output.index), []).append(output)
    assert manager.check_integrity() == []
    return outputs


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_up, "TIMED_ROWS", (1, 2, 8))
    monkeypatch.setattr(warm_up, "NUM_TIMINGS", 1)


def a_gpu() -> Launcher:
    return GpuLauncher(torch.device("cuda", 0))


NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("launcher_of", [SimulatorLauncher, pytest.param(a_gpu, marks=NEEDS_GPU)])
def test_tokens_equal_those_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher_of: Callable[[], Launcher]
) -> None:
    make_model(tmp_path, "llama")
    replayed: list[int] = []
    replay = cuda_graphs._RecordedStep.run

    def counted(self: cuda_graphs._RecordedStep, batch: object, prefixes: object) -> torch.Tensor:
        replayed.append(self._shape.size)
        return replay(self, batch, prefixes)  # type: ignore[arg-type]

    monkeypatch.setattr(cuda_graphs._RecordedStep, "run", counted)
    requests = [
        # In two chunks, then repeating itself, so that drafts are verified.
        request("greedy", [5, 6, 7, 8] * 7, max_tokens=8),
        # A fork inside a block copies it.
        request("choices", [3, 1, 4], 2, max_tokens=4, temperature=1.3, top_p=0.95, seed=7, num_logprobs=2),
        request(
            "adjusted", [2, 7, 1], max_tokens=4, repetition_penalty=1.3, frequency_penalty=0.2,
            logit_bias={9: 4.0, 11: -3.0}, min_tokens=3, stop_token_ids=frozenset({9}),
            bad_words=((3,), *((t, t) for t in range(16))), num_prompt_logprobs=1,
        ),
    ]  # fmt: skip
    launcher = launcher_of()
    loaded = load(tmp_path, CudaBackend(launcher, 0.9))
    assert loaded.info.device == launcher.name
    replayed.clear()
    actual, expected = serve(loaded, requests), serve(load(tmp_path), requests)
    assert 4 in replayed, "steps of one row a sequence are recorded ones"
    assert sum(output.num_draft_tokens for output in actual["greedy", 0]) > 0
    assert actual.keys() == expected.keys()
    for key, outputs in expected.items():
        assert tokens(actual[key]) == tokens(outputs), key
    for key in (("choices", 0), ("choices", 1)):
        for ours, theirs in zip(actual[key], expected[key], strict=True):
            assert ours.logprobs is not None
            assert theirs.logprobs is not None
            assert ours.logprobs.chosen == pytest.approx(theirs.logprobs.chosen, abs=1e-4)
            assert ours.logprobs.top_ids.tolist() == theirs.logprobs.top_ids.tolist()
    prompts = [outputs["adjusted", 0][0].prompt_logprobs for outputs in (actual, expected)]
    chosen = [logprobs.chosen for logprobs in prompts if logprobs is not None]
    assert len(chosen) == 2
    assert chosen[0] == pytest.approx(chosen[1], abs=1e-4)


@pytest.mark.usefixtures("quick")
def test_the_pool_takes_what_the_weights_leave_of_the_memory(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    checkpoint = open_checkpoint(str(tmp_path))
    sized = engine_options(dtype="float16", num_blocks=0, max_num_seqs=1, max_num_batched_tokens=16)
    loaded = load_model(checkpoint, sized, CudaBackend(SimulatorLauncher(), 0.5))
    assert loaded.info.dtype == "float16", "a GPU computes in what is asked for"
    # 4 of 10 MB are in use; a block of 2 layers takes 2 * 2 * 16 * 64 * 2 bytes.
    assert loaded.info.limits.num_blocks == 1_000_000 // 8192
    with pytest.raises(ModelError, match=r"leaves no memory for a KV pool.*--gpu-memory-utilization"):
        load_model(checkpoint, sized, CudaBackend(SimulatorLauncher(), 0.4))
