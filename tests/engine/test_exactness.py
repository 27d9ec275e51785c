"""Whatever happens around a request, its tokens are those it gets alone in an empty engine."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sequence import FinishReason, Request, SamplingParams, Sequence
from engine.speculation.draft_model import DraftModel
from engine.speculation.drafter import Drafter
from engine.speculation.prompt_lookup import PromptLookup
from engine.speculation.shared_index import SharedIndex
from tests.engine.automaton import Automaton
from tests.engine.harness import Finished, Harness, request
from tests.engine.hash_model import HashModel, small_pool
from tests.engine.liars import LyingDrafter


def alone(r: Request) -> dict[tuple[str, int], Finished]:
    return Harness(num_blocks=256, budget=4096).run(r)


prompts = st.integers(0, 2).flatmap(
    # Few different beginnings, so that prefixes are shared.
    lambda kind: st.lists(st.integers(0, 31), min_size=1, max_size=70).map(lambda tail: [kind] * 40 + tail)
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], SamplingParams, int, int, Automaton | None]:
    """A prompt, how to sample, number of choices, priority, a grammar."""
    penalty = draw(st.sampled_from([1.0, 1.3]))
    sampling = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.5])),
        seed=draw(st.integers(0, 2**64 - 1)),
        max_tokens=draw(st.integers(1, 40)),
        min_tokens=draw(st.integers(0, 4)),
        stop_token_ids=frozenset({3}),
        bad_words=draw(st.sampled_from([(), ((7,), (5, 11), *((t, t) for t in range(32)))])),
        repetition_penalty=penalty,
        frequency_penalty=penalty - 1,
        num_logprobs=2,
    )
    grammar = draw(st.sampled_from([None, None, Automaton()]))
    return draw(prompts), sampling, draw(st.integers(1, 3)), draw(st.integers(0, 2)), grammar


@settings(max_examples=60, deadline=None)
@given(
    st.lists(requests(), min_size=1, max_size=8),
    st.integers(24, 80),
    st.integers(1, 5),
    st.sampled_from([16, 33, 200]),
    st.sampled_from(["none", "lookup", "liar", "model", "all"]),
    st.sampled_from([1, 2, 5]),
    st.integers(0, 2**32),
)
def test_output_does_not_depend_on_pool_batch_chunks_preemption_or_drafts(
    specs: list[tuple[list[int], SamplingParams, int, int, Automaton | None]],
    num_blocks: int,
    max_num_seqs: int,
    budget: int,
    drafting: str,
    max_branches: int,
    order: int,
) -> None:
    expected: dict[tuple[str, int], Finished] = {}

    def truth(sequence: Sequence) -> list[int]:
        """What the sequence will say."""
        known = expected[sequence.request.request_id, sequence.index].tokens
        return known[sequence.num_output :]

    model = DraftModel(HashModel(), small_pool(num_blocks // 2), 32, 1024)
    drafters: dict[str, list[Drafter]] = {
        "none": [],
        "lookup": [SharedIndex(), PromptLookup(max_branches)],
        "liar": [LyingDrafter(order, truth, max_branches)],
        "model": [model],
        "all": [SharedIndex(), LyingDrafter(order, truth, max_branches), PromptLookup(max_branches), model],
    }
    harness = Harness(num_blocks, max_num_seqs, budget, drafters=drafters[drafting])
    wanted = {
        f"r{i}": Request(f"r{i}", prompt, sampling, num_choices=n, priority=priority, grammar=grammar)
        for i, (prompt, sampling, n, priority, grammar) in enumerate(specs)
    }
    for one in wanted.values():
        expected.update(alone(one))
    waiting, rng = list(wanted.values()), random.Random(order)
    while waiting or harness.engine.has_work:
        if waiting and rng.random() < 0.4:
            harness.engine.add(waiting.pop())
        harness.step()
        if rng.random() < 0.1:
            assert harness.manager.check_integrity() == []
    for key, choice in expected.items():
        got = harness.choices[key]
        assert (got.tokens, got.reason, got.logprobs) == (choice.tokens, choice.reason, choice.logprobs)
    harness.assert_idle_and_clean()
    assert model.num_free_blocks == num_blocks // 2


def test_a_pool_too_small_for_all_preempts_and_resumes() -> None:
    harness = Harness(num_blocks=12, max_num_seqs=8)
    together = [request(f"r{i}", [i] * 20, max_tokens=100) for i in range(4)]
    outputs = harness.run(*together)
    assert harness.engine.metrics.num_preemptions > 0
    for one in together:
        assert outputs[one.request_id, 0].tokens == alone(one)[one.request_id, 0].tokens
    harness.assert_idle_and_clean()


def test_second_request_finds_the_full_blocks_of_the_shared_prefix() -> None:
    harness = Harness()
    prefix = [t % 30 for t in range(100)]
    harness.run(request("first", [*prefix, 1, 2, 3]))
    harness.run(request("second", [*prefix, 4, 5, 6]))
    assert harness.choices["first", 0].num_cached == 0
    assert harness.choices["second", 0].num_cached == 96
    harness.assert_idle_and_clean()


def test_a_whole_cached_prompt_still_computes_its_last_token() -> None:
    harness = Harness()
    prompt = [t % 30 for t in range(64)]
    harness.run(request("first", prompt))
    harness.run(request("second", prompt))
    assert harness.choices["second", 0].num_cached == 48
    assert harness.choices["second", 0].tokens == harness.choices["first", 0].tokens


@pytest.mark.parametrize("when", range(8))
def test_abort_at_any_step_frees_everything_and_ends_once(when: int) -> None:
    harness = Harness(budget=16)
    harness.engine.add(request("gone", list(range(30)) * 2, num_choices=3, max_tokens=50))
    harness.engine.add(request("stays", list(range(25)), max_tokens=10))
    for _ in range(when):
        harness.step()
    harness.engine.abort("gone")
    harness.run()
    gone = [choice for (name, _), choice in harness.choices.items() if name == "gone"]
    assert [choice.reason for choice in gone] == [FinishReason.ABORT] * 3
    assert harness.choices["stays", 0].reason is FinishReason.LENGTH
    harness.assert_idle_and_clean()


def test_losing_the_epoch_starts_sequences_over_with_the_same_output() -> None:
    harness = Harness()
    requests = [request(f"r{i}", [i, 2, 3] * 9, num_choices=1 + i, temperature=1.0, seed=i) for i in range(3)]
    for one in requests:
        harness.engine.add(one)
    for _ in range(5):
        harness.step()
    harness.manager.register_engine("engine-0", harness.num_blocks, 16, "hash-model")
    harness.run()
    for one in requests:
        for key, choice in alone(one).items():
            assert harness.choices[key].tokens == choice.tokens
    harness.assert_idle_and_clean()
