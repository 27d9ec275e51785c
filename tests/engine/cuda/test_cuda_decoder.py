"""The GPU's decoder in the simulator against the transformers library; and how decode steps are padded."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from engine import kv_pool
from engine.batch import Batch, ScheduledSequence, build_batch
from engine.errors import ModelError
from engine.kernels.cuda.kernels import CudaKernels
from engine.kernels.cuda.packing import PackedArrays
from engine.model import cuda_graphs, cuda_ops
from engine.model.cuda_decoder import CudaDecoder
from engine.model.cuda_ops import CudaOps, device_batch, shared_prefixes
from engine.sequence import Request, SamplingParams, Sequence
from engine.weights.load import open_checkpoint
from tests.engine.cuda.simulator import TUNING, SimulatorLauncher

SMALL: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, Any] = {
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
}
CPU = torch.device("cpu")


def kernels() -> CudaKernels:
    return CudaKernels(SimulatorLauncher(), TUNING)


def make_model(directory: Path, family: str, **changes: Any) -> Any:
    torch.manual_seed(5)
    sizes = {name: value for name, value in SMALL.items() if family != "qwen2" or name != "head_dim"}
    if family == "qwen2":  # it has no head_dim of its own
        sizes["hidden_size"] = 128
    config = FAMILIES[family](**{**sizes, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, mean=0.8, std=0.3)
    model.save_pretrained(directory)
    return model


def batch_of(*rows: tuple[list[int], int, list[int]]) -> Batch:
    """Of each sequence its tokens, how many of them are computed, and its blocks."""
    scheduled = []
    for i, (tokens, start, blocks) in enumerate(rows):
        sequence = Sequence(Request(f"r{i}", tokens, SamplingParams()), 0, i)
        sequence.block_table = blocks
        scheduled.append(ScheduledSequence(sequence, start, len(tokens) - start))
    return build_batch(tuple(scheduled))


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_a_prompt_in_chunks_and_a_neighbour_give_the_logits_of_transformers(
    tmp_path: Path, family: str
) -> None:
    reference = make_model(tmp_path, family)
    model = CudaDecoder(open_checkpoint(str(tmp_path)), torch.float32, 128, kernels())
    kv = kv_pool.allocate(2, 5, 1, 64, torch.float32)
    long, short = [t * 7 % 40 for t in range(18)], [3, 1]
    model.logits(batch_of((long[:12], 0, [3, 1])), kv)
    second = model.logits(batch_of((short, 0, [4]), (long[:17], 12, [3, 1])), kv)
    third = model.logits(batch_of((long, 17, [3, 1])), kv)
    expected_long = reference(torch.tensor([long])).logits[0]
    expected_short = reference(torch.tensor([short])).logits[0]
    torch.testing.assert_close(second[0], expected_short[-1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(second[1], expected_long[16], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(third[0], expected_long[17], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_step_without_logits_lasts_until_it_has_run(tmp_path: Path) -> None:
    waits: list[int] = []

    class Waiting(SimulatorLauncher):
        def wait(self) -> None:
            waits.append(1)

    make_model(tmp_path, "llama", num_hidden_layers=1)
    model = CudaDecoder(open_checkpoint(str(tmp_path)), torch.float32, 128, CudaKernels(Waiting(), TUNING))
    kv = kv_pool.allocate(1, 1, 1, 64, torch.float32)
    model.record_decodes(kv, 1, 16)
    sequence = Sequence(Request("r", [1, 2, 3], SamplingParams()), 0, 0)
    sequence.block_table = [0]
    for num_tokens in (2, 1):  # launched, replayed
        logits = model.logits(build_batch((ScheduledSequence(sequence, 0, num_tokens),)), kv)
        assert logits.shape == (0, 40)
    assert waits == [1, 1]


@torch.inference_mode()
def test_bfloat16_is_close(tmp_path: Path) -> None:
    reference = make_model(tmp_path, "llama")
    model = CudaDecoder(open_checkpoint(str(tmp_path)), torch.bfloat16, 128, kernels())
    kv = kv_pool.allocate(2, 3, 1, 64, torch.bfloat16)
    tokens = [t * 3 % 40 for t in range(19)]
    ours = model.logits(batch_of((tokens, 0, [2, 0])), kv)
    expected = reference(torch.tensor([tokens])).logits[0, -1:]
    assert torch.nn.functional.cosine_similarity(ours, expected).item() > 0.995


def test_a_head_size_without_kernels_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", head_dim=80)
    with pytest.raises(ModelError, match="head_dim 80 is not served on a GPU"):
        CudaDecoder(open_checkpoint(str(tmp_path)), torch.float32, 128, kernels())


def assert_shapes_of(recorded: list[Any], arrays: list[Any]) -> None:
    """All but the page tables have the shapes of what was recorded; those fit in."""
    for index, (array, room) in enumerate(zip(arrays, recorded, strict=True)):
        assert np.less_equal(array.shape, room.shape).all()
        assert array.shape == room.shape or index == 10


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_padded_decode_step_gives_the_same_attention(shares: bool, dtype: torch.dtype) -> None:
    ops = CudaOps(kernels(), 2, 1, dtype)
    common = [5, 2, 7, 3] if shares else []
    lengths, own = [73, 66, 80], [[1], [4], [6]]
    tables = [common + blocks if common else [blocks[0], 8, 9, 10, 11] for blocks in own]
    batch = batch_of(*(([0] * n, n - 1, table) for n, table in zip(lengths, tables, strict=True)))
    prefixes = shared_prefixes(batch)
    assert bool(prefixes) == shares
    kv = kv_pool.allocate(1, 12, 1, 64, dtype)
    torch.manual_seed(0)
    kv.pages.normal_()
    q = torch.randn(8, 2, 64).to(dtype)

    shape = cuda_graphs._Shape(ops, 8, 6, shares)
    # What is recorded has the shapes of what is replayed.
    recorded, warm_up = shape.padded(*cuda_graphs._warm_up_batch(shape))
    plan, arrays = shape.padded(batch, prefixes)
    assert_shapes_of(warm_up, arrays)
    assert [p[1:] for p in plan.phases] == [p[1:] for p in recorded.phases]
    packed = PackedArrays(warm_up, CPU)
    padded_batch = device_batch(recorded, packed)
    packed.send(arrays)
    padded = ops.attention(q, padded_batch, kv, 0, 0.125)
    plain = ops.attention(q[:3], ops.to_device(batch), kv, 0, 0.125)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(padded[:3], plain, rtol=tolerance, atol=tolerance)
    assert padded_batch.slot_mapping[3:].tolist() == [-1] * 5


def test_a_group_of_more_heads_than_a_tile_has_rows_can_be_recorded() -> None:
    ops = CudaOps(kernels(), 18, 1, torch.float32)
    shape = cuda_graphs._Shape(ops, 4, 6, shares=False)
    recorded, warm_up = shape.padded(*cuda_graphs._warm_up_batch(shape))
    plan, arrays = shape.padded(batch_of(([0] * 20, 19, [1, 2]), ([0] * 9, 8, [3])), [])
    assert_shapes_of(warm_up, arrays)
    assert [phase.tiles.shape for phase in plan.phases] == [phase.tiles.shape for phase in recorded.phases]


def test_long_chunks_attended_to_by_torch_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    ops = CudaOps(kernels(), 4, 2, torch.bfloat16)
    batch = batch_of(([0] * 21, 9, [5, 2]), ([0] * 3, 1, [4]))
    kv = kv_pool.allocate(1, 6, 2, 64, torch.bfloat16)
    torch.manual_seed(0)
    kv.pages.normal_()
    q = torch.randn(14, 4, 64).bfloat16()
    ours = ops.attention(q, ops.to_device(batch), kv, 0, 0.125)
    monkeypatch.setattr(cuda_ops, "LONG_PREFILL", 12)
    on_device = ops.to_device(batch)
    assert [prefill.sequence for prefill in on_device.long_prefills] == [0]
    torch.testing.assert_close(ops.attention(q, on_device, kv, 0, 0.125), ours, rtol=1e-2, atol=1e-2)


def test_buckets_cover_every_number_of_sequences() -> None:
    for most in (1, 3, 8, 20, 70, 256, 4096):
        sizes = cuda_graphs.buckets(most)
        assert sizes[-1] == min(most, cuda_graphs.MAX_SEQUENCES)
        assert list(sizes) == sorted(set(sizes))
        assert np.diff(sizes).max(initial=0) <= 32
