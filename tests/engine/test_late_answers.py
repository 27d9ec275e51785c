"""Forks, aborts, preemption and lost epochs while answers of the memory manager are late."""

import random
from dataclasses import replace

import pytest

from engine.memory_client import UpdateAnswer
from engine.sequence import FinishReason
from tests.engine.harness import MAX_STEPS, Harness, request
from tests.in_process_memory import InProcessMemory, LateMemory


@pytest.mark.parametrize("seed", range(10))
def test_random_lives(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks, max_num_seqs, budget = rng.randint(20, 60), rng.randint(2, 8), rng.choice((16, 64))
    harness = Harness(num_blocks, max_num_seqs, budget, memory=lambda manager: LateMemory(manager, rng))
    requests = [
        request(
            f"r{i}",
            [rng.randrange(3)] * rng.choice((5, 16, 40)) + rng.choices(range(32), k=rng.randint(1, 40)),
            num_choices=rng.randint(1, 4),
            priority=rng.randint(0, 2),
            max_tokens=rng.choice((1, 2, 5, 40)),
            temperature=1.0,
            seed=i,
            stop_token_ids=frozenset(rng.sample(range(32), rng.choice((0, 8)))),
        )
        for i in range(12)
    ]
    expected = {}
    for one in requests:
        expected.update(Harness(num_blocks=256, budget=4096).run(one))
    waiting, aborted = list(requests), set[tuple[str, int]]()
    for _ in range(MAX_STEPS):
        if not waiting and not harness.engine.has_work:
            break
        if waiting and rng.random() < 0.3:
            harness.engine.add(waiting.pop())
        harness.step()
        if rng.random() < 0.05:
            one = rng.choice(requests)
            index = rng.choice((None, rng.randrange(one.num_choices)))
            aborted.update((one.request_id, i) for i in range(one.num_choices) if index in (None, i))
            harness.engine.abort(one.request_id, index=index)
        if rng.random() < 0.01:
            harness.manager.register_engine("engine-0", harness.num_blocks, 16, "hash-model")
        if rng.random() < 0.1:
            assert harness.manager.check_integrity() == []
    for key, choice in harness.choices.items():
        whole = expected[key]
        if choice.reason is FinishReason.ABORT:
            assert key in aborted
            assert choice.tokens == whole.tokens[: len(choice.tokens)]
        else:
            assert (choice.tokens, choice.reason) == (whole.tokens, whole.reason)
    assert harness.choices.keys() == expected.keys()
    harness.assert_idle_and_clean()


def test_a_fork_that_nobody_asked_for_yet_ends_with_its_request() -> None:
    harness = Harness()
    harness.engine.add(request("r", [1, 2, 3], num_choices=3))
    harness.step()  # the prompt is computed, its forks are wanted
    harness.engine.abort("r")
    harness.run()
    harness.assert_idle_and_clean()


@pytest.mark.parametrize("when", range(6))
@pytest.mark.parametrize("index", range(3))
def test_one_choice_is_aborted_and_the_others_go_on(when: int, index: int) -> None:
    one = request("r", [t % 30 for t in range(60)], num_choices=3, temperature=1.0, max_tokens=30)
    expected = Harness().run(one)
    harness = Harness(budget=32)
    harness.engine.add(one)
    for _ in range(when):
        harness.step()
    harness.engine.abort("r", index=index)
    harness.run()
    assert harness.choices.keys() == expected.keys()
    for key, choice in harness.choices.items():
        if key[1] == index:
            assert choice.reason is FinishReason.ABORT
        else:
            assert (choice.tokens, choice.reason) == (expected[key].tokens, expected[key].reason)
    harness.assert_idle_and_clean()


class SlowMemory(InProcessMemory):
    """Answers what nobody waits for one step late."""

    def receive(self, timeout_s: float) -> UpdateAnswer | None:
        return None if timeout_s == 0 else super().receive(timeout_s)


@pytest.mark.parametrize("num_tokens", [48, 64])
def test_the_heir_of_a_choice_gets_the_room_that_was_asked_for(num_tokens: int) -> None:
    """The first choice ends with its first token while the answer about its next block is on its way."""
    prompt = [t % 30 for t in range(num_tokens)]
    one = request("r", prompt, num_choices=2, temperature=1.0, seed=3, max_tokens=40)
    (stop, *_), (other, *_) = (choice.tokens for choice in Harness().run(one).values())
    assert stop != other
    stopping = replace(one, sampling=replace(one.sampling, stop_token_ids=frozenset({stop})))
    expected = Harness().run(stopping)
    harness = Harness(budget=32, memory=SlowMemory)
    choices = harness.run(stopping)
    assert choices["r", 0].tokens == [stop]
    assert choices["r", 1].tokens == expected["r", 1].tokens
    harness.assert_idle_and_clean()
