"""The default model against golden outputs computed by the transformers library in float32."""

import json
from pathlib import Path
from typing import Any

import torch

from engine import kv_pool
from engine.batch import ScheduledSequence, build_batch
from engine.model.cpu_decoder import CpuDecoder
from engine.sequence import Request, SamplingParams, Sequence
from engine.weights.load import open_checkpoint

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "greedy_golden.json").read_text()
)["cases"]


def teacher_forced_misses(dtype: torch.dtype, int8_weights: bool = False) -> list[float]:
    """The reference's top-2 margins where our likeliest token is not the reference's."""
    model = CpuDecoder(open_checkpoint("smollm2-135m-instruct"), dtype, 512, int8_weights)
    c = model.config
    kv = kv_pool.allocate(c.num_layers, 8, c.num_kv_heads, c.head_dim, dtype)
    misses = []
    for case in CASES:
        prompt, output = case["prompt_token_ids"], case["output_token_ids"]
        tokens = prompt + output[:-1]
        sequence = Sequence(Request("r", tokens, SamplingParams(num_prompt_logprobs=0)), 0, 0)
        sequence.block_table = [7, 1, 5, 0, 3, 2, 6, 4]
        logits = model.logits(build_batch((ScheduledSequence(sequence, 0, len(tokens)),)), kv)
        likeliest = logits[len(prompt) - 1 :].argmax(-1).tolist()
        margins = zip(likeliest, output, case["top2_margin"], strict=True)
        misses += [margin for ours, reference, margin in margins if ours != reference]
    return misses


def test_float32_is_identical() -> None:
    assert teacher_forced_misses(torch.float32) == []


def test_bfloat16_misses_only_near_ties() -> None:
    misses = teacher_forced_misses(torch.bfloat16)
    num_tokens = sum(len(case["output_token_ids"]) for case in CASES)
    assert len(misses) <= 0.015 * num_tokens
    assert all(margin <= 0.25 for margin in misses)


def test_int8_weights_agree() -> None:
    misses = teacher_forced_misses(torch.bfloat16, int8_weights=True)
    assert len(misses) <= 0.05 * sum(len(case["output_token_ids"]) for case in CASES)
    assert all(margin <= 1.0 for margin in misses)


def test_the_checkpoint_is_described() -> None:
    config = open_checkpoint("smollm2-135m-instruct").config
    assert config.eos_token_ids == (2,)
    assert (config.num_layers, config.hidden_size, config.max_position) == (30, 576, 8192)
