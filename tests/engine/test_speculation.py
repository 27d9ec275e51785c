"""Traps of speculative decoding, each by its name."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import Batch
from engine.engine import Engine
from engine.kv_pool import KVPool
from engine.runner import ModelRunner
from engine.scheduler import SchedulerLimits
from engine.sequence import FinishReason, OfferedDraft, Sequence
from engine.speculation.drafter import DraftSource, DraftTree
from engine.speculation.planner import MAX_DRAFT_TOKENS, SpeculationPlanner
from engine.speculation.prompt_lookup import PromptLookup
from engine.speculation.shared_index import SharedIndex
from engine.speculation.step_cost import StepCost
from memory_manager import MemoryConfig, MemoryManager
from tests.engine.harness import Harness, request
from tests.engine.hash_model import HashModel, small_pool
from tests.engine.liars import LyingDrafter
from tests.in_process_memory import InProcessMemory


class Scripted:
    """A drafter that proposes what it is told, once the sequence has an output."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def propose(self, sequence: Sequence, max_depth: int) -> DraftTree | None:
        if sequence.num_output != 1:
            return None
        return DraftTree.chain(self._tokens[:max_depth], DraftSource.PROMPT_LOOKUP)


class TableModel:
    """Its next token is a function of the last one."""

    def __init__(self, following: dict[int, int], vocab_size: int = 1000) -> None:
        self._following = following
        self._vocab_size = vocab_size

    def logits(self, batch: Batch, kv: KVPool) -> torch.Tensor:
        kv.keys(0).view(-1)[torch.from_numpy(batch.slot_mapping).long()] = 1.0
        rows = [self._following.get(int(t), 7) for t in batch.token_ids[batch.logit_rows]]
        return torch.nn.functional.one_hot(torch.tensor(rows), self._vocab_size).float()


def test_three_of_four_drafts_are_kept_and_the_surplus_block_goes_back() -> None:
    """Drafts [100, 101, 102, 103], target [100, 101, 999]."""
    manager, kv = MemoryManager(MemoryConfig()), small_pool(8)
    model = TableModel({1: 50, 50: 100, 100: 101, 101: 999, 102: 103})
    planner = SpeculationPlanner([Scripted([100, 101, 102, 103])], StepCost([(1, 1.0), (100, 1.001)]))
    engine = Engine(ModelRunner(model, kv), InProcessMemory(manager), SchedulerLimits(8), "table", planner)
    engine.add(request("r", [1] * 25, max_tokens=40))
    outputs, num_held = [], []
    for _ in range(6):
        outputs += engine.step()
        num_held.append(8 - manager.stats().engines[0].num_free)
        assert manager.check_integrity() == []
    drafted = [o for o in outputs if o.num_draft_tokens]
    assert [(o.token_ids, o.num_draft_tokens, o.num_accepted_tokens) for o in drafted] == [
        ([100, 101, 999], 4, 2)
    ]
    # 25 + 1 + 3 tokens fit two blocks; a third was held in reserve for more drafts.
    assert 2 in num_held[num_held.index(3) :]
    stats = manager.stats().engines[0]
    assert stats.num_truncated_blocks == 1
    assert stats.num_forks == 0, "nothing was copied"
    engine.abort("r")
    while engine.has_work:
        engine.step()
    stats = manager.stats().engines[0]
    assert stats.num_free + stats.num_evictable == 8


def test_stop_tokens_and_length_cut_an_accepted_run_its_logprobs_and_its_usage() -> None:
    free = Harness().run(request("r", [5, 6, 7], max_tokens=20, num_logprobs=0))["r", 0]
    cuts: list[tuple[int, FinishReason, dict[str, Any]]] = [
        (end, FinishReason.LENGTH, {"max_tokens": end}) for end in range(1, 20)
    ]
    for stop in set(free.tokens):
        params: dict[str, Any] = {"max_tokens": 20, "stop_token_ids": frozenset({stop})}
        cuts.append((free.tokens.index(stop) + 1, FinishReason.STOP, params))
    for end, reason, params in cuts:
        harness = Harness(drafters=[Scripted(free.tokens[1:])])
        cut = harness.run(request("r", [5, 6, 7], num_logprobs=0, **params))["r", 0]
        assert (cut.tokens, cut.reason, cut.logprobs) == (free.tokens[:end], reason, free.logprobs[:end])
        # The first token comes without a draft. Behind it up to 12 fit the first block and leave room for
        # the target's own; of those that are right only those before the cut count.
        num_drafted = 12 if reason is FinishReason.STOP else max(0, min(12, end - 2))
        assert cut.num_accepted == min(end - 1, num_drafted)
        harness.assert_idle_and_clean()


def test_a_stop_token_wins_over_the_length_at_the_same_place() -> None:
    free = Harness().run(request("r", [5, 6, 7], max_tokens=20))["r", 0].tokens
    end = next(i for i, token in enumerate(free) if i > 2 and token not in free[:i]) + 1
    stops = frozenset({free[end - 1]})
    both = request("r", [5, 6, 7], max_tokens=end, stop_token_ids=stops)
    stopped = Harness(drafters=[Scripted(free[1:])]).run(both)["r", 0]
    assert (stopped.tokens, stopped.reason) == (free[:end], FinishReason.STOP)


ADJUSTMENTS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"frequency_penalty": 1.5},
    {"presence_penalty": 1.9},
    {"logit_bias": {t: -100.0 for t in range(0, 32, 2)}},
    {"min_tokens": 12, "stop_token_ids": frozenset(range(0, 32, 3))},
    # Tokens that never come, and behind each token others that do not.
    {"bad_words": ((4,), (9,), *((t, u) for t in range(32) for u in range(t % 3, 32, 3)))},
    {"min_p": 0.4, "temperature": 1.5, "seed": 5},
    {"top_p": 0.5, "temperature": 1.5, "seed": 5},
    {"top_k": 3, "temperature": 1.5, "seed": 5},
]


@pytest.mark.parametrize("max_branches", [1, 4], ids=["chains", "trees"])
@pytest.mark.parametrize("adjustment", ADJUSTMENTS, ids=lambda a: next(iter(a)))
def test_every_adjustment_applies_at_each_drafted_position(
    adjustment: dict[str, Any], max_branches: int
) -> None:
    prompt, length = [5, 6, 7, 5, 6, 7], 40
    alone = Harness().run(request("r", prompt, max_tokens=length, **adjustment))["r", 0]
    plain = {"temperature": adjustment.get("temperature", 0.0), "seed": adjustment.get("seed", 0)}
    without = Harness().run(request("r", prompt, max_tokens=length, **plain))["r", 0]
    assert without.tokens[: len(alone.tokens)] != alone.tokens, "the adjustment does something"

    def truth(sequence: Sequence) -> list[int]:
        return alone.tokens[sequence.num_output :]

    harness = Harness(drafters=[LyingDrafter(2, truth, max_branches)])
    drafted = harness.run(request("r", prompt, max_tokens=length, **adjustment))["r", 0]
    assert (drafted.tokens, drafted.reason) == (alone.tokens, alone.reason)
    assert drafted.num_accepted > len(alone.tokens) // 3


def test_logprobs_come_from_the_verified_rows_that_of_the_last_token_included() -> None:
    free = Harness().run(request("r", [5, 6, 7], max_tokens=12, num_logprobs=0))["r", 0]
    harness = Harness(drafters=[Scripted([*free.tokens[1:5], (free.tokens[5] + 1) % 32])])
    harness.engine.add(request("r", [5, 6, 7], max_tokens=12, num_logprobs=0))
    outputs = []
    while harness.engine.has_work:
        outputs += harness.step()
    (verified,) = [output for output in outputs if output.num_draft_tokens]
    assert verified.token_ids == free.tokens[1:6]
    assert verified.logprobs is not None
    assert verified.logprobs.chosen.tolist() == free.logprobs[1:6]


def test_rows_without_drafts_consume_nothing() -> None:
    """A sequence that drafts shares its steps with one that must not."""
    harness = Harness(drafters=[Scripted([9, 9, 9, 9])])
    harness.engine.add(request("drafts", [5, 6, 7], max_tokens=10))
    harness.engine.add(replace(request("not", [1, 2, 3], max_tokens=10), disable_speculation=True))
    outputs = []
    while harness.engine.has_work:
        outputs += harness.step()
    assert sum(output.num_draft_tokens for output in outputs if output.request_id == "not") == 0
    tokens = harness.engine.metrics.tokens_per_step
    # Two prompts of 3 tokens, then 9 rows for each of the two at most, and 4 rows of drafts.
    assert tokens.sum <= 6 + 2 * 9 + 4
    assert (
        harness.choices["not", 0].tokens
        == Harness().run(request("not", [1, 2, 3], max_tokens=10))["not", 0].tokens
    )


def test_a_preempted_or_aborted_sequence_drops_its_drafts() -> None:
    harness = Harness(num_blocks=12, drafters=[SharedIndex(), PromptLookup()])
    running = harness.engine._scheduler._running
    dropped = []
    for i in range(4):
        harness.engine.add(request(f"r{i}", [i, 1, 2] * 7, max_tokens=90))
    while harness.engine.has_work:
        before = list(running)
        harness.step()
        dropped += [sequence for sequence in before if sequence not in running]
        if harness.engine.metrics.num_steps == 30 and running:
            harness.engine.abort(running[0].request.request_id)
    assert harness.engine.metrics.num_preemptions > 0
    assert any(sequence.num_preemptions for sequence in dropped)
    for sequence in dropped:
        assert sequence.offered_draft is None
        assert sequence.block_table == []
    harness.assert_idle_and_clean()


def test_nothing_is_drafted_beyond_the_models_context() -> None:
    """Positions from there on have no rotary embedding."""

    class Watching(HashModel):
        def logits(self, batch: Batch, kv: KVPool) -> torch.Tensor:
            assert batch.positions.max() < 50
            return super().logits(batch, kv)

    planner = SpeculationPlanner([LyingDrafter(5)], StepCost([(1, 1.0), (100, 1.001)]))
    memory, limits = InProcessMemory(MemoryManager(MemoryConfig())), SchedulerLimits(16, max_model_len=50)
    engine = Engine(ModelRunner(Watching(), small_pool(16)), memory, limits, "hash", planner)
    engine.add(request("r", [1, 2, 3], max_tokens=500))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert sum(len(output.token_ids) for output in outputs) == 47
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_rejected_drafts_are_counted_as_drafts_and_never_as_tokens() -> None:
    harness = Harness(drafters=[Scripted([31, 31, 31, 31])])
    done = harness.run(request("r", [5, 6, 7], max_tokens=10))["r", 0]
    assert len(done.tokens) == 10
    assert harness.engine.metrics.num_draft_tokens > 0
    assert harness.engine.metrics.num_prefill_tokens == 3
    assert harness.engine.metrics.num_decode_tokens == 10


@pytest.mark.parametrize("max_branches", [1, 4], ids=["chains", "trees"])
def test_no_shared_block_is_ever_written(max_branches: int) -> None:
    """The blocks of a cached prefix are watched while others draft behind it: any write would show."""
    harness = Harness(drafters=[LyingDrafter(1, max_branches=max_branches)])
    prefix = [t % 5 for t in range(64)]
    harness.run(request("first", prefix, max_tokens=2))
    pool = harness.engine._runner._kv.pages
    snapshot = harness.manager.inspect_blocks("engine-0")
    shared = torch.from_numpy(np.flatnonzero(snapshot.depths > 0))
    before = pool[:, :, shared].clone()
    for i in range(4):
        harness.run(request(f"again-{i}", [*prefix, i], max_tokens=30, temperature=1.0, seed=i))
    assert torch.equal(pool[:, :, shared], before)
    assert harness.engine.metrics.num_draft_tokens > 0


def test_speculation_can_be_switched_off_for_a_request() -> None:
    harness = Harness(drafters=[PromptLookup()])
    harness.run(replace(request("r", [1, 2, 3, 4] * 8, max_tokens=20), disable_speculation=True))
    assert harness.engine.metrics.num_draft_tokens == 0


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_distribution_is_the_targets_whatever_is_drafted(temperature: float) -> None:
    """Next tokens over many seeds, with a drafter that always proposes the same."""

    def tally(drafters: list[Scripted]) -> Counter[tuple[int, ...]]:
        harness = Harness(num_blocks=2000, max_num_seqs=400, budget=4000, drafters=drafters)
        requests = [
            request(str(i), [1, 2], max_tokens=3, temperature=temperature, seed=i) for i in range(400)
        ]
        return Counter(tuple(choice.tokens) for choice in harness.run(*requests).values())

    assert tally([Scripted([4, 4])]) == tally([])


def test_what_was_seen_before_is_drafted_from_the_third_token_on() -> None:
    """The offer comes while the second is computed, and room for the next draft before it is wanted."""
    harness = Harness(drafters=[SharedIndex()])
    prompt, num_tokens = list(range(40)), 200
    harness.run(request("first", prompt, max_tokens=num_tokens))
    harness.engine.add(request("again", prompt, max_tokens=num_tokens))
    drafted = []
    while harness.engine.has_work:
        drafted += [output.num_draft_tokens for output in harness.step()]
    assert harness.choices["again", 0].tokens == harness.choices["first", 0].tokens
    assert [count > 0 for count in drafted[:3]] == [False, False, True]
    # The first draft ends with the block that is there; some of the others are cut, none is missing.
    assert all(drafted[2:])
    assert len(drafted) <= 3 + 1.25 * num_tokens / (MAX_DRAFT_TOKENS + 1)
    harness.assert_idle_and_clean()


def test_an_offer_rests_on_a_match_as_long_as_it_is() -> None:
    sequence = Sequence(request("r", [1, 2, 3], max_tokens=50), 0, 0)
    sequence.offered_draft = OfferedDraft(3, [7, 8, 9, 10, 11])
    sequence.tokens += [7, 8]
    draft = SharedIndex().propose(sequence, 2)
    assert draft is not None
    assert (draft.tokens, draft.match_length) == ([9, 10], 7)
