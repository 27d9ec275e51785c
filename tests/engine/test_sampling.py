"""Sampling on rows against plain references."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.sampling import philox_uniform, sample_rows
from engine.sampler import SampleRow, sample
from engine.sequence import Request, SamplingParams, Sequence

Float32 = npt.NDArray[np.float32]


def draw(
    logits: Float32,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    count: int = 1,
) -> list[int]:
    """`count` draws from one row of logits, at positions 0, 1, 2 …"""
    out = np.empty(count, np.int32)
    sample_rows(
        np.repeat(logits[None], count, 0),
        np.full(count, temperature, np.float32),
        np.full(count, top_k, np.int32),
        np.full(count, top_p, np.float32),
        np.full(count, min_p, np.float32),
        np.full(count, 17, np.uint64),
        np.zeros(count, np.int64),
        np.arange(count),
        out,
    )
    return [int(token) for token in out]


def reference_distribution(
    logits: Float32, temperature: float, top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.float64]:
    """The filtered distribution by definition: min_p, then top_k, then top_p of what is left."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    weights[weights < min_p] = 0
    order = np.argsort(-weights, kind="stable")
    kept = order[: top_k or len(order)]
    total, mass, chosen = weights[kept].sum(), 0.0, []
    for token in kept:
        if mass >= top_p * total:
            break
        chosen.append(token)
        mass += weights[token]
    probabilities: npt.NDArray[np.float64] = np.zeros_like(weights)
    probabilities[chosen] = weights[chosen] / weights[chosen].sum()
    return probabilities


def test_philox_known_answer() -> None:
    """Zero key and counter give 6627e8d5 e169c58d bc57ac4c 9b00dbd8 (Random123's known answers)."""
    high, low = 0x6627E8D5 >> 5, 0xE169C58D >> 6
    assert philox_uniform(0, 0, 0) == (high * 67108864 + low) / 9007199254740992


def test_temperature_zero_is_argmax_and_the_lowest_id_wins_ties() -> None:
    assert draw(np.array([1, 5, 5, 2], np.float32), 0.0) == [1]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (3, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.2), (5, 0.9, 0.05)]
)
def test_the_empirical_distribution_is_the_filtered_one(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.random.default_rng(5).normal(0, 1.5, 12).astype(np.float32)
    expected = reference_distribution(logits, temperature, top_k, top_p, min_p)
    count = 200_000
    drawn = np.bincount(draw(logits, temperature, top_k, top_p, min_p, count), minlength=12) / count
    assert (drawn[expected == 0] == 0).all()
    assert np.abs(drawn - expected).sum() / 2 < 0.005


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=60),
    st.floats(0.0625, 3, width=32),
    st.integers(0, 70),
    st.floats(0.015625, 1, width=32),
    st.floats(0, 1, width=32),
)
def test_only_tokens_the_filters_keep_are_drawn(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.array(values, np.float32)
    expected = reference_distribution(logits, temperature, top_k, top_p, min_p)
    # Where float32 and float64 may cut at different tokens the nearly equal ones are allowed too.
    weakest = expected[expected > 0].min()
    allowed = np.exp((logits - logits.max()) / temperature) >= np.exp(-0.001) * weakest * (1 / expected.max())
    for token in draw(logits, temperature, top_k, top_p, min_p, count=20):
        assert allowed[token]


def one(logits: torch.Tensor, tokens: list[int], num_prompt: int, **params: object) -> int:
    sampling = SamplingParams(temperature=0, max_tokens=100, **params)  # type: ignore[arg-type]
    sequence = Sequence(Request("r", tokens[:num_prompt], sampling), 0, 0)
    sequence.tokens += tokens[num_prompt:]
    return sample(logits[None], [SampleRow(0, sequence)])[0].tokens[0]


def test_penalties_and_biases() -> None:
    logits = torch.tensor([3.0, 2.9, 2.0, 0.0])
    assert one(logits, [1], 1) == 0
    assert one(logits, [0], 1, repetition_penalty=1.5) == 1
    assert one(logits, [0], 1, presence_penalty=2.0) == 0, "the prompt does not count"
    assert one(logits, [3, 0], 1, presence_penalty=0.5) == 1
    assert one(logits, [3, 0, 0, 1], 1, frequency_penalty=1.5) == 2
    assert one(logits, [1], 1, logit_bias={3: 10.0}) == 3
    assert one(logits, [1], 1, logit_bias={0: -100.0}) == 1
    assert one(logits, [1], 1, min_tokens=1, stop_token_ids=frozenset({0})) == 1
    assert one(logits, [1, 3], 1, min_tokens=1, stop_token_ids=frozenset({0})) == 0
    assert logits.tolist() == [3.0, pytest.approx(2.9), 2.0, 0.0], "the model's logits are left alone"


def test_a_bad_word_is_banned_where_its_last_token_would_complete_it() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0, 0.0])
    assert one(logits, [1], 1, bad_words=((0,),)) == 1
    assert one(logits, [1, 3], 1, bad_words=((0,), (3, 1))) == 2
    assert one(logits, [1, 2], 1, bad_words=((3, 0), (1, 2, 0))) == 0, "the output ends differently"
    assert one(logits, [1, 2, 3], 1, bad_words=((2, 3, 0),)) == 1
    assert one(logits, [2, 3], 1, bad_words=((2, 3, 0),)) == 0, "the prompt does not count"
    assert one(logits, [1], 1, bad_words=((0, 0),)) == 0
    assert one(logits, [1, 0], 1, bad_words=((0, 0),)) == 1
    assert one(logits, [1, 0], 1, bad_words=((0, 0, 0),)) == 0
    assert one(logits, [1], 1, bad_words=((0,),), logit_bias={0: 100.0}) == 1
    assert logits.tolist() == [3.0, 2.0, 1.0, 0.0], "the model's logits are left alone"


def test_drafted_tokens_are_output_to_a_bad_word() -> None:
    params = SamplingParams(temperature=0, max_tokens=9, bad_words=((2, 0), (2, 1, 1)))
    sequence = Sequence(Request("r", [1, 2], params), 0, 0)
    drafts: list[list[int]] = [[], [2], [3, 2], [2, 1], [2, 3]]
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * len(drafts))
    rows = [SampleRow(row, sequence, drafted) for row, drafted in enumerate(drafts)]
    assert [sampled.tokens for sampled in sample(logits, rows)] == [[0], [1], [1], [0], [0]]
    logits[:, 1] = 4.0
    assert [sampled.tokens for sampled in sample(logits, rows)] == [[1], [1], [1], [0], [1]]


def test_a_bad_word_that_began_before_a_request_was_taken_over_is_not_completed() -> None:
    params = SamplingParams(temperature=0, max_tokens=9, bad_words=((2, 0), (1, 3)))
    logits = torch.tensor([[9.0, 1.0, 2.0, 8.0]])
    for generated, expected in (([2], 3), ([1], 0), ([], 0)):
        taken_over = Sequence(Request("r", [2], params, generated), 0, 0)
        assert sample(logits, [SampleRow(0, taken_over)])[0].tokens == [expected]


def test_logprobs_are_those_of_the_unmodified_distribution() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    params = SamplingParams(
        temperature=0, max_tokens=9, logit_bias={3: 50.0}, bad_words=((1,),), num_logprobs=2
    )
    sampled = sample(logits, [SampleRow(0, Sequence(Request("r", [1], params), 0, 0))])[0]
    expected = torch.log_softmax(logits[0], -1)
    assert sampled.tokens == [3]
    assert sampled.logprobs is not None
    assert sampled.logprobs.chosen[0] == pytest.approx(float(expected[3]))
    assert sampled.logprobs.top_ids.tolist() == [[1, 2]]
    assert sampled.logprobs.top[0].tolist() == pytest.approx([float(expected[1]), float(expected[2])])
