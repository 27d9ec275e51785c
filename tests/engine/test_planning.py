"""What is drafted, and how much of it is verified."""

from engine.sequence import Sequence
from engine.speculation.acceptance import Acceptance
from engine.speculation.drafter import DraftSource, DraftTree
from engine.speculation.planner import SpeculationPlanner
from engine.speculation.prompt_lookup import PromptLookup
from engine.speculation.step_cost import StepCost
from tests.engine.harness import request


def test_prompt_lookup_proposes_what_followed_the_longest_match() -> None:
    tokens = [1, 2, 3, 4, 9, 9, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4]
    sequence = Sequence(request("r", tokens), 0, 0)
    lookup = PromptLookup()
    draft = lookup.propose(sequence, 8)
    assert draft is not None
    assert draft.tokens == [9, 9, 2, 3]
    sequence.tokens += [5, 6]
    following = lookup.propose(sequence, 2)
    assert following is not None
    assert following.tokens == [7, 1]


def test_drafts_are_not_made_where_they_do_not_pay() -> None:
    sequences = [Sequence(request(f"r{i}", [1, 2, 3, 1, 2, 3]), 0, i) for i in range(8)]
    for sequence in sequences:
        sequence.block_table = [0, 1, 2]
    costly = SpeculationPlanner([PromptLookup()], StepCost([(1, 1.0), (100, 100.0)]))
    assert costly.plan(sequences, 0, 1000) == {}
    cheap = SpeculationPlanner([PromptLookup()], StepCost([(1, 1.0), (100, 1.01)]))
    assert len(cheap.plan(sequences, 0, 1000)) == 8
    assert sum(len(d.tokens) for d in cheap.plan(sequences, 0, 10).values()) <= 10


def test_drafts_must_pay_for_a_plain_step_that_is_cheaper() -> None:
    sequences = [Sequence(request(f"r{i}", [1, 2, 3, 1, 2, 3]), 0, i) for i in range(8)]
    for sequence in sequences:
        sequence.block_table = [0, 1, 2]
    flat = [(1, 1.0), (100, 1.01)]
    for plain_seconds, num_drafts in ((0.9, 8), (0.1, 0)):
        plain = StepCost([(rows, plain_seconds * seconds) for rows, seconds in flat])
        planner = SpeculationPlanner([PromptLookup()], StepCost(flat), plain)
        assert len(planner.plan(sequences, 0, 1000)) == num_drafts
        # A prefill chunk makes no step of one row a sequence.
        assert len(planner.plan(sequences, 32, 1000)) == 8


def test_acceptance_is_learned() -> None:
    sequence, acceptance = Sequence(request("r", [1]), 0, 0), Acceptance()
    draft = DraftTree.chain([1, 2, 3, 4], DraftSource.PROMPT_LOOKUP)
    for _ in range(30):
        acceptance.learn(sequence, draft, [7])
    assert sequence.acceptance < 0.05
    for _ in range(30):
        acceptance.learn(sequence, draft, [1, 2, 3, 4, 7])
    assert sequence.acceptance > 0.95


def test_long_matches_are_trusted_more_when_they_were_right_more_often() -> None:
    acceptance, newcomer = Acceptance(), Sequence(request("new", [1]), 0, 0)
    short, long = (DraftTree.chain([5, 6], DraftSource.PROMPT_LOOKUP, length) for length in (3, 20))
    for i in range(100):
        sequence = Sequence(request(f"r{i}", [1]), 0, i)
        acceptance.learn(sequence, short, [7])
        acceptance.learn(sequence, long, [5, 6, 7])
    (first_short, _), (first_long, second_long) = (acceptance.chances(newcomer, d) for d in (short, long))
    assert first_short < 0.5 < 0.8 < first_long
    assert second_long > 0.8
    # Deep in a chain the match is as long as if it had been from the start.
    deep = acceptance.chances(newcomer, DraftTree.chain([1] * 19, DraftSource.PROMPT_LOOKUP, 3))
    assert deep[17] == first_long
    assert deep[0] == first_short
