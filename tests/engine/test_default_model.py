"""The default model against golden outputs computed by the transformers library in float32."""

import pytest
import torch

from engine.weights.load import open_checkpoint
from tests.engine.golden import CASES, MODES, Golden, Mode, num_tokens

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


def test_bfloat16_misses_only_near_ties() -> None:
    misses = Golden(torch.bfloat16).forced_misses(CASES)
    assert len(misses) <= 0.015 * num_tokens(CASES)
    assert all(margin <= 0.25 for margin in misses)


def test_int8_weights_agree() -> None:
    misses = Golden(torch.bfloat16, int8_weights=True).forced_misses(CASES)
    assert len(misses) <= 0.05 * num_tokens(CASES)
    assert all(margin <= 1.0 for margin in misses)


def test_the_checkpoint_is_described() -> None:
    config = open_checkpoint("smollm2-135m-instruct").config
    assert config.eos_token_ids == (2,)
    assert (config.num_layers, config.hidden_size, config.max_position) == (30, 576, 8192)
