"""The GPU check where there is no GPU: its parity part in the simulator, and what it says."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine import warm_up
from engine.gpu_check import __main__ as gpu_check
from engine.gpu_check import parity, serving
from engine.gpu_check.parity import Scenario, Sizes
from engine.gpu_check.random_model import LLAMA_1B
from engine.gpu_check.report import Measurement, table, write_json
from engine.kernels.cuda.kernels import CudaKernels
from engine.kernels.cuda.plan import Tuning
from tests.engine.cuda.simulator import SimulatorLauncher

TINY = Sizes(
    scenarios=(Scenario("decode", [1, 2], [20, 3]), Scenario("shared", [1, 1], [18, 19], 1)),
    tree_prefix=5, tree_nodes=6, rows=3, width=40, sampled_rows=2, vocab=50,
)  # fmt: skip


def test_parity_holds_in_the_simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "HEAD_DIMS", (64,))
    monkeypatch.setattr(parity, "GROUPS", (3,))
    kernels = CudaKernels(SimulatorLauncher(), Tuning(page_warps=1, row_warps=1, max_threads=32))
    measurements = parity.measure(lambda head_dim: kernels, torch.device("cpu"), TINY)
    assert [m for m in measurements if not m.met] == []
    names = {m.name.split(".")[1] for m in measurements}
    assert names >= {"decode", "shared", "tree", "rms_norm", "rope_q", "rope_k", "write_v", "sample_rows"}


def test_requests_served_together_or_drafted_get_the_tokens_they_get_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warm_up, "TIMED_ROWS", (1,))
    tiny = replace(
        LLAMA_1B, num_layers=1, hidden_size=64, num_heads=2, num_kv_heads=1, intermediate_size=48,
        vocab_size=40, max_position=64,
    )  # fmt: skip
    measurements = serving.agreement(SimulatorLauncher(), tiny, serving.Sizes(2, 5, 5))
    assert [m.name.split(".", 2)[2] for m in measurements] == [
        "greedy.together", "greedy.drafted", "greedy.trees",
        "sampled.together", "sampled.drafted", "sampled.trees",
    ]  # fmt: skip
    assert [m for m in measurements if not m.met] == []


def test_a_wrong_result_is_not_met() -> None:
    nan, one = torch.tensor([torch.nan]), torch.ones(1)
    assert parity._error(nan, one) == float("inf")
    assert not Measurement("parity", 0.3, "", "lower", 0.1).met


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_one_sentence_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu-check"])
    assert gpu_check.main() != 0
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert "no CUDA GPU can be used" in output.err


def test_figures_as_a_table_and_as_json(tmp_path: Path) -> None:
    measurements = [
        Measurement("copy", 4.3, "TB/s", "higher"),
        Measurement("decode.share", 0.5, "of the copy bandwidth", "higher", 0.6),
        Measurement("parity.decode", 0.001, "of the greatest value", "lower", 0.02),
    ]
    lines = table(measurements).splitlines()
    assert len(lines) == 4
    assert "NOT MET" in lines[2]
    assert "0.02  met" in lines[3]
    write_json(tmp_path / "figures.json", {"gpu": "none"}, measurements)
    written = json.loads((tmp_path / "figures.json").read_text())
    assert [m["met"] for m in written["measurements"]] == [True, False, True]


def test_it_needs_torch_and_numba_only() -> None:
    others = "safetensors gguf grpc tokenizers transformers huggingface_hub fastapi services memory_manager"
    program = (
        "import sys, engine.gpu_check.__main__\n"
        f"print([name for name in {others.split()} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
