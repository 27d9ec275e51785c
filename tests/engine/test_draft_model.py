"""Drafts from a model: what it proposes, what it keeps in its pages, and when it gives them back."""

import json
from pathlib import Path

import pytest
import torch

from engine import kv_pool
from engine.backends.cpu import CpuBackend
from engine.batch import Batch
from engine.errors import ModelError
from engine.kv_pool import KVPool
from engine.model.cpu_decoder import CpuDecoder
from engine.scheduler import SchedulerLimits
from engine.sequence import Sequence
from engine.speculation.draft_loading import check_vocabulary, load_draft_weights
from engine.speculation.draft_model import CATCH_UP_TOKENS, DraftModel
from engine.speculation.drafter import DraftSource
from engine.speculation.planner import SpeculationPlanner
from engine.speculation.step_cost import StepCost
from engine.weights.load import open_checkpoint
from tests.engine.harness import Harness, request
from tests.engine.hash_model import HashModel, small_pool
from tests.engine.test_families import make_model


class Counting(HashModel):
    """Notes the rows of every call."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def logits(self, batch: Batch, kv: KVPool) -> torch.Tensor:
        self.rows.append(batch.num_tokens)
        return super().logits(batch, kv)


def draft_model(model: HashModel | None = None, num_blocks: int = 64, vocab_size: int = 32) -> DraftModel:
    return DraftModel(model or HashModel(), small_pool(num_blocks), vocab_size, max_position=1024)


def test_an_identical_model_is_always_right() -> None:
    expected = Harness().run(request("r", [5, 6, 7], max_tokens=60))["r", 0]
    drafter = draft_model()
    harness = Harness(drafters=[drafter])
    harness.engine.add(request("r", [5, 6, 7], max_tokens=60))
    outputs = []
    while harness.engine.has_work:
        outputs += harness.step()
    assert harness.choices["r", 0].tokens == expected.tokens
    metrics = harness.engine.metrics
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 40
    sources = {output.draft_source for output in outputs if output.num_draft_tokens}
    assert sources == {DraftSource.DRAFT_MODEL}
    assert drafter.num_free_blocks == 64
    harness.assert_idle_and_clean()


def test_another_model_changes_nothing_but_how_much_is_accepted() -> None:
    requests = [
        request(f"r{i}", [i, 2, 3] * 6, max_tokens=50, temperature=i / 2, seed=i, num_choices=1 + i % 2)
        for i in range(5)
    ]
    expected = {key: one.tokens for r in requests for key, one in Harness().run(r).items()}
    drafter = draft_model(HashModel(vocab_size=20), num_blocks=9)
    harness = Harness(num_blocks=30, drafters=[drafter])
    assert {key: one.tokens for key, one in harness.run(*requests).items()} == expected
    metrics = harness.engine.metrics
    assert 0 < metrics.num_accepted_tokens < metrics.num_draft_tokens
    assert drafter.num_free_blocks == 9
    harness.assert_idle_and_clean()


def test_what_was_accepted_is_not_computed_again() -> None:
    model, sequence = Counting(), Sequence(request("r", [1, 2, 3, 4, 5]), 0, 0)
    drafter = draft_model(model)
    first = drafter.propose(sequence, 3)
    assert first is not None
    assert model.rows == [5, 1, 1]
    # Two are accepted; the third has no K/V anyway.
    sequence.tokens += [*first.tokens[:2], 31]
    model.rows.clear()
    second = drafter.propose(sequence, 2)
    assert model.rows == [1, 1]
    # Nothing is accepted.
    sequence.tokens += [30]
    model.rows.clear()
    third = drafter.propose(sequence, 2)
    assert model.rows == [1, 1]
    for draft, tokens in ((second, sequence.tokens[:-1]), (third, sequence.tokens)):
        fresh = draft_model().propose(Sequence(request("r", tokens), 0, 0), 2)
        assert draft is not None
        assert fresh is not None
        assert draft.tokens == fresh.tokens


def test_a_model_that_lags_catches_up_without_holding_up_a_step() -> None:
    model = Counting()
    drafter = draft_model(model, num_blocks=128)
    prompt = [t % 31 for t in range(2 * CATCH_UP_TOKENS + 40)]
    sequence = Sequence(request("r", prompt), 0, 0)
    others = [Sequence(request(name, prompt), 0, 0) for name in ("s", "t")]
    for num_rows in ([CATCH_UP_TOKENS], [CATCH_UP_TOKENS], [40, 1, CATCH_UP_TOKENS - 39]):
        model.rows.clear()
        drafter.start_step()
        draft, *nothing = [drafter.propose(one, 2) for one in (sequence, *others)]
        assert model.rows == num_rows
        assert nothing == [None, None]
    fresh = draft_model()
    sequence.drop_blocks()
    while (expected := fresh.propose(sequence, 2)) is None:
        fresh.start_step()
    assert draft is not None
    assert draft.tokens == expected.tokens


def test_without_free_pages_or_beyond_its_context_it_has_no_idea() -> None:
    drafter = draft_model(num_blocks=2)
    first, second = (Sequence(request(name, [1] * 20), 0, 0) for name in ("a", "b"))
    assert drafter.propose(first, 4) is not None
    assert drafter.propose(second, 4) is None
    first.drop_blocks()
    assert drafter.num_free_blocks == 2
    assert drafter.propose(second, 4) is not None
    short = DraftModel(HashModel(), small_pool(8), 32, max_position=22)
    draft = short.propose(first, 4)
    assert draft is not None
    assert len(draft.tokens) == 2
    first.tokens += [1, 1]
    assert short.propose(first, 4) is None


def test_tokens_it_does_not_know_do_no_harm() -> None:
    drafter = draft_model(HashModel(vocab_size=20), vocab_size=20)
    draft = drafter.propose(Sequence(request("r", [1, 25, 31]), 0, 0), 4)
    assert draft is not None
    assert max(draft.tokens) < 20


def test_it_is_asked_only_for_what_is_worth_its_time() -> None:
    cost = StepCost([(1, 1.0), (100, 1.1)])
    asked = []
    for seconds in (0.0, 0.3, 2.0):
        drafter = DraftModel(HashModel(), small_pool(8), 32, 1024, seconds_per_token=seconds)
        sequence = Sequence(request("r", [1, 2, 3]), 0, 0)
        sequence.block_table = [0, 1, 2]
        plan = SpeculationPlanner([], cost, draft_model=drafter).plan([sequence], 0, 100)
        asked.append(len(plan[0].tokens) if plan else 0)
    assert asked[0] > asked[1] > asked[2] == 0


def test_preempted_and_aborted_sequences_give_back_their_pages() -> None:
    drafter = draft_model()
    harness = Harness(num_blocks=12, drafters=[drafter])
    for i in range(4):
        harness.engine.add(request(f"r{i}", [i] * 20, max_tokens=100))
    while harness.engine.has_work:
        harness.step()
        running = harness.engine._scheduler._running
        held = sum(len(s.shadow.block_table) for s in running if s.shadow is not None)
        assert drafter.num_free_blocks == 64 - held
        if harness.engine.metrics.num_steps == 12:
            harness.engine.abort("r1")
    assert harness.engine.metrics.num_preemptions > 0
    assert drafter.num_free_blocks == 64
    harness.assert_idle_and_clean()


def write_vocabulary(directory: Path, tokens: list[str]) -> None:
    added = {"id": len(tokens), "content": "<end>"}
    vocabulary = {token: i for i, token in enumerate(tokens)}
    text = json.dumps({"model": {"vocab": vocabulary}, "added_tokens": [added]})
    (directory / "tokenizer.json").write_text(text)


def test_another_vocabulary_is_refused_and_both_models_are_named(tmp_path: Path) -> None:
    for name in ("target", "draft"):
        make_model(tmp_path / name, "llama")
        write_vocabulary(tmp_path / name, ["a", "b", "c"])
    target, draft = (open_checkpoint(str(tmp_path / name)) for name in ("target", "draft"))
    assert target.vocabulary() == ["a", "b", "c", "<end>"]
    check_vocabulary(draft, target)
    write_vocabulary(tmp_path / "draft", ["a", "c", "b"])
    with pytest.raises(ModelError, match="draft model draft has another vocabulary than target"):
        check_vocabulary(draft, target)
    with pytest.raises(ModelError, match="another vocabulary than smollm2-135m-instruct"):
        check_vocabulary(draft, open_checkpoint("smollm2-135m-instruct"))
    (tmp_path / "draft" / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json: no vocabulary"):
        check_vocabulary(draft, target)
    (tmp_path / "draft" / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer.json does not exist"):
        check_vocabulary(draft, target)


def test_a_loaded_model_drafts_what_it_would_say(tmp_path: Path) -> None:
    make_model(tmp_path, "llama")
    checkpoint = open_checkpoint(str(tmp_path))
    backend, limits = CpuBackend(0, 0.1), SchedulerLimits(8, max_model_len=100)
    drafter = load_draft_weights(checkpoint, backend, torch.float32, 1000).start(backend, limits, 200)
    assert drafter.seconds_per_token > 0
    sequence = Sequence(request("r", [3, 1, 4, 1, 5]), 0, 0)
    draft = drafter.propose(sequence, 6)
    assert draft is not None
    config = checkpoint.config
    model = CpuDecoder(checkpoint, torch.float32, 100)
    kv = kv_pool.allocate(config.num_layers, 8, config.num_kv_heads, config.head_dim, torch.float32)
    other = DraftModel(model, kv, config.vocab_size, 100)
    for i, token in enumerate(draft.tokens):
        following = other.propose(Sequence(request("r", [*sequence.tokens, *draft.tokens[:i]]), 0, 0), 1)
        assert following is not None
        assert following.tokens == [token]
