"""Outputs that obey a grammar: masks at every position, drafts cut and states rolled back."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from engine.grammar import Grammar, allowed_tokens, is_legal
from engine.sampler import SampleRow, sample
from engine.sequence import FinishReason, Request, SamplingParams, Sequence
from engine.speculation.drafter import DraftSource, DraftTree
from tests.engine.automaton import Automaton, AutomatonMatcher
from tests.engine.harness import Harness, request
from tests.engine.liars import LyingDrafter
from tests.engine.test_speculation import Scripted

ENDLESS = Automaton(ends=False)


def obeying(name: str, prompt: list[int], grammar: Grammar = ENDLESS, **params: Any) -> Request:
    return replace(request(name, prompt, **params), grammar=grammar)


class Bits:
    """A matcher that always allows the same tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def start(self) -> "Bits":
        return self

    def accept(self, token: int) -> bool:
        return token in self._tokens

    def rollback(self, num_tokens: int) -> None:
        """There is no state."""

    def fill_mask(self, mask: npt.NDArray[np.int32]) -> None:
        for token in self._tokens:
            mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 70])
def test_a_mask_is_read_bit_by_bit(vocab_size: int) -> None:
    tokens = [t for t in range(vocab_size) if t % 5 in (0, 4)]
    assert np.flatnonzero(allowed_tokens(Bits(tokens), vocab_size)).tolist() == tokens


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_only_what_the_grammar_allows_is_drawn_and_logprobs_are_those_of_the_model(
    temperature: float,
) -> None:
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(1)) * 3
    for seed in range(40):
        params = SamplingParams(temperature=temperature, seed=seed, num_logprobs=0, logit_bias={1: 100.0})
        sequence = Sequence(Request("r", [1], params, grammar=Bits([5, 40, 63])), 0, 0)
        drawn = sample(logits, [SampleRow(0, sequence)])[0]
        assert drawn.tokens[0] in (5, 40, 63)
        assert drawn.logprobs is not None
        expected = torch.log_softmax(logits[0], -1)[drawn.tokens[0]]
        assert drawn.logprobs.chosen[0] == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize(
    "banning", [{"min_tokens": 5, "stop_token_ids": frozenset({0})}, {"bad_words": ((0,),)}], ids=str
)
def test_what_is_banned_is_avoided_unless_the_grammar_allows_nothing_else(banning: dict[str, Any]) -> None:
    logits = torch.tensor([[9.0, 1.0, 2.0, 0.0]])
    for legal, expected in (([0, 1], 1), ([0], 0), ([0, 3], 3)):
        params = SamplingParams(temperature=0, **banning)
        row = SampleRow(0, Sequence(Request("r", [1], params, grammar=Bits(legal)), 0, 0))
        assert sample(logits, [row])[0].tokens == [expected]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_an_output_obeys_to_its_end(temperature: float) -> None:
    grammar = Automaton()
    params: dict[str, Any] = {"max_tokens": 60, "stop_token_ids": frozenset({3}), "temperature": temperature}
    harness = Harness()
    for seed in range(5):
        free = harness.run(request(f"free-{seed}", [seed, 2, 3], seed=seed, **params))[f"free-{seed}", 0]
        name = f"bound-{seed}"
        bound = harness.run(obeying(name, [seed, 2, 3], grammar, seed=seed, **params))[name, 0]
        assert grammar.allows(bound.tokens)
        assert not grammar.allows(free.tokens), "the grammar does something"
        assert (bound.reason is FinishReason.STOP) == (bound.tokens[-1] == 3)


@pytest.mark.parametrize("max_branches", [1, 4], ids=["chains", "trees"])
def test_the_mask_advances_at_each_drafted_position(max_branches: int) -> None:
    alone = Harness().run(obeying("r", [5, 6, 7], max_tokens=40))["r", 0].tokens

    def truth(sequence: Sequence) -> list[int]:
        return alone[sequence.num_output :]

    harness = Harness(drafters=[LyingDrafter(2, truth, max_branches)])
    drafted = harness.run(obeying("r", [5, 6, 7], max_tokens=40))["r", 0]
    assert drafted.tokens == alone
    assert drafted.num_accepted > len(alone) // 3
    harness.assert_idle_and_clean()


def test_where_only_an_end_is_allowed_it_ends_the_output_however_early() -> None:
    done = Harness().run(obeying("r", [5], Bits([3]), min_tokens=7, stop_token_ids=frozenset({3})))["r", 0]
    assert (done.tokens, done.reason) == ([3], FinishReason.STOP)


def test_where_one_drafter_has_nothing_legal_the_next_is_asked() -> None:
    first, *rest = Harness().run(obeying("r", [5, 6, 7], max_tokens=8))["r", 0].tokens
    illegal = next(t for t in range(32) if not ENDLESS.allows([first, t]))
    harness = Harness(drafters=[Scripted([illegal, illegal]), Scripted(rest[:4])])
    assert harness.run(obeying("r", [5, 6, 7], max_tokens=8))["r", 0].num_accepted == 4


def test_nothing_is_drafted_behind_an_end() -> None:
    every = Bits(list(range(32)))
    first, second, third, *_ = Harness().run(request("r", [5, 6, 7], max_tokens=8))["r", 0].tokens
    for ends, num_drafted in ((frozenset({second}), 1), (frozenset({third}), 2), (frozenset({99}), 3)):
        harness = Harness(drafters=[Scripted([second, third, 1])])
        harness.run(obeying("r", [5, 6, 7], every, max_tokens=8, stop_token_ids=ends - {first}))
        assert harness.engine.metrics.num_draft_tokens == num_drafted


def test_a_draft_is_cut_at_its_first_illegal_token() -> None:
    first, *rest = Harness().run(obeying("r", [5, 6, 7], max_tokens=8))["r", 0].tokens
    for num_legal in range(6):
        illegal = next(t for t in range(32) if not ENDLESS.allows([first, *rest[:num_legal], t]))
        harness = Harness(drafters=[Scripted([*rest[:num_legal], illegal, *rest[num_legal + 1 :]])])
        harness.engine.add(obeying("r", [5, 6, 7], max_tokens=20))
        outputs = []
        while harness.engine.has_work:
            outputs += harness.step()
        assert sum(output.num_draft_tokens for output in outputs) == num_legal
        assert sum(output.num_accepted_tokens for output in outputs) == num_legal


def test_a_tree_keeps_its_legal_branches() -> None:
    class Forked:
        def propose(self, sequence: Sequence, max_depth: int) -> DraftTree | None:
            parents = [0 if i % 2 == 0 else i for i in range(len(tokens))]
            return DraftTree(tokens, parents, DraftSource.PROMPT_LOOKUP) if sequence.num_output == 1 else None

    tokens = [t for t in range(0, 32, 4) for _ in range(2)]  # each of these, and itself behind it
    harness = Harness(drafters=[Forked()])
    (first, *_), matcher = Harness().run(obeying("r", [5, 6, 7]))["r", 0].tokens, ENDLESS.start()
    matcher.accept(first)
    legal = [path for t in tokens[::2] for path in ([t], [t, t]) if is_legal(matcher, path)]
    assert 2 < len(legal) < 12 < len(tokens)
    harness.engine.add(obeying("r", [5, 6, 7], max_tokens=20))
    outputs = []
    while harness.engine.has_work:
        outputs += harness.step()
    assert sum(output.num_draft_tokens for output in outputs) == len(legal)


def test_rejected_drafts_leave_no_trace_in_the_matcher() -> None:
    """Legal drafts that the target does not say; watched at every step."""
    harness = Harness(drafters=[LyingDrafter(4, max_branches=3)])
    harness.engine.add(obeying("r", [5, 6, 7], max_tokens=120))
    num_rejected, seen = 0, []
    while harness.engine.has_work:
        running = list(harness.engine._scheduler._running)
        outputs = harness.step()
        num_rejected += sum(o.num_draft_tokens - o.num_accepted_tokens for o in outputs)
        for sequence in running:
            assert isinstance(sequence.matcher, AutomatonMatcher)
            expected = ENDLESS.start()
            assert all(expected.accept(token) for token in sequence.tokens[sequence.num_prompt :])
            assert sequence.matcher.states == expected.states
            seen.append(len(expected.states))
    assert num_rejected > 20
    assert max(seen) == 121


def test_every_choice_has_a_state_of_its_own_and_a_preempted_one_keeps_it() -> None:
    harness = Harness(num_blocks=12)
    asked = [obeying(f"r{i}", [i] * 20, num_choices=2, max_tokens=60, temperature=1.4) for i in range(3)]
    done = harness.run(*asked)
    assert harness.engine.metrics.num_preemptions > 0
    for key, choice in done.items():
        assert ENDLESS.allows(choice.tokens), key
        assert len(choice.tokens) == 60
    assert done["r0", 0].tokens != done["r0", 1].tokens


def test_a_request_taken_over_from_a_lost_engine_goes_on_in_the_grammar() -> None:
    whole = Harness().run(obeying("r", [5, 6, 7], max_tokens=30))["r", 0].tokens
    again = Request("r", [5, 6, 7], SamplingParams(temperature=0, max_tokens=30), whole[:11], grammar=ENDLESS)
    assert Harness().run(again)["r", 0].tokens == whole[11:]
