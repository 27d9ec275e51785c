"""Whose turn it is, how long anyone waits, and what is refused."""

import pytest
import torch

from engine.batch import Batch
from engine.engine import Engine
from engine.errors import QueueFullError, TooLargeError
from engine.kv_pool import KVPool
from engine.runner import ModelRunner
from engine.scheduler import SchedulerLimits
from engine.selection import MAX_LOGIT_ROWS
from engine.sequence import FinishReason, Request, SamplingParams
from memory_manager import MemoryConfig, MemoryManager
from tests.engine.harness import Harness, request
from tests.engine.hash_model import HashModel, small_pool
from tests.in_process_memory import InProcessMemory


def tenant_request(name: str, tenant: str, length: int = 30) -> Request:
    prompt = [*name.encode(), *range(length - len(name) + 1)]  # no two begin with the same block
    return Request(name, [t % 32 for t in prompt], SamplingParams(temperature=0, max_tokens=8), tenant=tenant)


def finish_order(harness: Harness) -> list[str]:
    order: list[str] = []
    while harness.engine.has_work:
        order += [o.request_id for o in harness.step() if o.finish_reason is not None]
    return order


def test_higher_priority_goes_first() -> None:
    harness = Harness(max_num_seqs=1)
    for name, priority in (("low", 0), ("high", 5), ("middle", 3)):
        harness.engine.add(request(name, [1, 2, 3], priority=priority))
    assert finish_order(harness) == ["high", "middle", "low"]


def test_within_a_priority_first_come_first_served() -> None:
    harness = Harness(max_num_seqs=1)
    for i in range(5):
        harness.engine.add(request(str(i), [i, 2, 3]))
    assert finish_order(harness) == list("01234")


def test_a_tenant_with_many_requests_does_not_delay_another() -> None:
    harness = Harness(max_num_seqs=1)
    for i in range(10):
        harness.engine.add(tenant_request(f"many-{i}", "greedy"))
    harness.step()
    harness.engine.add(tenant_request("one-0", "modest"))
    harness.engine.add(tenant_request("one-1", "modest"))
    order = finish_order(harness)
    assert order.index("one-0") <= 1
    assert order.index("one-1") <= 3


def test_a_tenant_that_was_away_gathers_no_credit() -> None:
    harness = Harness(max_num_seqs=1)
    for i in range(6):
        harness.engine.add(tenant_request(f"a-{i}", "a"))
    for _ in range(20):
        harness.step()
    for i in range(6):
        harness.engine.add(tenant_request(f"b-{i}", "b"))
    order = finish_order(harness)
    # From then on they alternate; b does not catch up on what a had before.
    assert 1 <= order[:6].count("b-0") + order[:6].count("b-1") + order[:6].count("b-2")
    assert any(name.startswith("a") for name in order[-3:]) or any(
        name.startswith("a") for name in order[2:6]
    )


def test_nor_does_one_that_finds_nobody_waiting() -> None:
    harness = Harness(max_num_seqs=1)
    for i in range(20):
        harness.run(tenant_request(f"b{i}", "b"))
    for i in range(20):
        harness.engine.add(tenant_request(f"a{i}", "a"))
    harness.step()
    harness.engine.add(tenant_request("b-last", "b"))
    assert "b-last" in finish_order(harness)[:5]


def test_decodes_run_in_every_step_while_a_long_prompt_is_computed() -> None:
    harness = Harness(num_blocks=600, max_num_seqs=16, budget=64)
    for i in range(8):
        harness.engine.add(request(f"short-{i}", [i] * 5, max_tokens=200))
    for _ in range(4):
        harness.step()
    harness.engine.add(request("long", [t % 31 for t in range(6000)], max_tokens=2))
    while harness.choices.get(("long", 0)) is None:
        tokens = sum(len(o.token_ids) for o in harness.step() if o.request_id.startswith("short"))
        finished = sum(1 for c in harness.choices.values() if c.reason is not None)
        assert tokens == 8 - finished or finished == 8
    harness.run()
    harness.assert_idle_and_clean()


def test_a_long_prompt_gets_its_turn_among_a_stream_of_short_requests() -> None:
    harness = Harness(num_blocks=40, max_num_seqs=8)
    for i in range(8):
        harness.engine.add(request(f"early-{i}", [i] * 20, max_tokens=10))
    harness.step()
    harness.engine.add(request("long", [7] * 500, max_tokens=2))
    late = 0
    while harness.choices.get(("long", 0)) is None:
        harness.engine.add(request(f"late-{late}", [late % 32] * 20, max_tokens=10))
        late += 1
        harness.step()
        # The early ones end after 12 steps, its own prompt takes 8.
        assert late < 25, "the long prompt starves"


def test_the_queue_is_bounded() -> None:
    harness = Harness(max_waiting=3)
    for i in range(3):
        harness.engine.add(request(str(i), [1]))
    with pytest.raises(QueueFullError, match="3 requests are waiting"):
        harness.engine.add(request("one too many", [1]))
    harness.run()
    assert len(harness.choices) == 3


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers() -> None:
    harness = Harness(num_blocks=4)
    with pytest.raises(TooLargeError, match="64 tokens do not fit: the pool holds 64"):
        harness.engine.add(request("huge", [1] * 64))


def test_a_sequence_that_fills_the_pool_ends_by_length() -> None:
    harness = Harness(num_blocks=4)
    harness.run(request("r", [1] * 50, max_tokens=100))
    choice = harness.choices["r", 0]
    assert choice.reason is FinishReason.LENGTH
    assert 50 + len(choice.tokens) == 64
    harness.assert_idle_and_clean()


def test_stop_tokens_win_over_the_length_and_wait_for_min_tokens() -> None:
    free = Harness().run(request("r", [5, 6], max_tokens=12))["r", 0].tokens
    stop = free[4]
    first = free.index(stop)
    stops = frozenset({stop})
    stopped = Harness().run(request("r", [5, 6], max_tokens=first + 1, stop_token_ids=stops))["r", 0]
    assert (stopped.tokens, stopped.reason) == (free[: first + 1], FinishReason.STOP)
    later = Harness().run(request("r", [5, 6], max_tokens=12, min_tokens=first + 2, stop_token_ids=stops))[
        "r", 0
    ]
    assert later.tokens[: first + 1] != free[: first + 1]
    assert stop not in later.tokens[: first + 1]


def test_an_aborts_blocks_are_back_within_one_step_and_the_delay_is_counted() -> None:
    harness = Harness()
    harness.engine.add(request("gone", [3] * 40, max_tokens=200))
    for _ in range(5):
        harness.step()
    assert harness.blocks_in_use() > 0
    harness.engine.abort("gone")
    harness.step()
    assert harness.blocks_in_use() == 0
    assert sum(harness.engine.metrics.abort_seconds.counts) == 1


def test_choices_count_among_the_sequences_that_run_at_once() -> None:
    harness = Harness(num_blocks=256, max_num_seqs=4)
    for i in range(6):
        harness.engine.add(request(f"r{i}", [i] * 20, num_choices=3, temperature=1.0))
    harness.engine.add(request("wide", [9] * 20, num_choices=6, temperature=1.0))
    while harness.engine.has_work:
        harness.step()
        widths = [1 + len(s.siblings) for s in harness.engine._scheduler._running]
        is_wide = any(s.request.request_id == "wide" for s in harness.engine._scheduler._running)
        assert sum(widths) <= (6 if is_wide else 4)
    assert len(harness.choices) == 6 * 3 + 6
    assert all(choice.reason is FinishReason.LENGTH for choice in harness.choices.values())


def test_a_budget_below_the_number_of_sequences_lets_nobody_stand_still() -> None:
    harness = Harness(num_blocks=256, max_num_seqs=32, budget=4)
    for i in range(8):
        harness.engine.add(request(f"r{i}", [i] * 2, max_tokens=10))
    while harness.engine.has_work:
        harness.step()
        assert len(harness.engine._scheduler._running) <= 4
    assert all(len(choice.tokens) == 10 for choice in harness.choices.values())


def test_prompt_logprobs_are_those_of_the_last_computation() -> None:
    """A prompt that loses its blocks half-way is computed again from its beginning."""
    harness = Harness(budget=32)
    harness.engine.add(request("r", [t % 31 for t in range(80)], num_prompt_logprobs=0, max_tokens=3))
    assert harness.step() == []
    harness.manager.register_engine("engine-0", harness.num_blocks, 16, "hash-model")
    while not (outputs := harness.step()):
        pass
    assert outputs[0].prompt_logprobs is not None
    assert len(outputs[0].prompt_logprobs.chosen) == 79


def test_a_step_computes_a_bounded_number_of_logits() -> None:
    class Watching(HashModel):
        def logits(self, batch: Batch, kv: KVPool) -> torch.Tensor:
            assert len(batch.logit_rows) <= MAX_LOGIT_ROWS + 3
            return super().logits(batch, kv)

    limits = SchedulerLimits(256, max_num_batched_tokens=4096)
    runner = ModelRunner(Watching(), small_pool(256))
    engine = Engine(runner, InProcessMemory(MemoryManager(MemoryConfig())), limits, "hash")
    for i in range(3):
        engine.add(request(f"r{i}", [i] * 700, num_prompt_logprobs=0, max_tokens=2))
    lengths = []
    while engine.has_work:
        for output in engine.step():
            if output.prompt_logprobs is not None:
                lengths.append(len(output.prompt_logprobs.chosen))
    assert lengths == [699] * 3
