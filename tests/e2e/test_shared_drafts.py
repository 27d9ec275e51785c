"""The shared draft index end to end: what was generated once is drafted the next time."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from nexuskv_client import Client
from tests.e2e.system import System, running_system

NUM_TOKENS = 48
PROMPT = "The quick brown fox jumps over"


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    log = tmp_path_factory.mktemp("drafts") / "log"
    with running_system(log, "--dtype", "float32", "--kv-blocks", "256") as system:
        yield system


def complete(system: System, **options: Any) -> tuple[str, dict[str, Any]]:
    """The text and what drafting did for it."""
    body = {"model": system.model, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0}
    response = httpx.post(
        f"{system.http}/v1/completions", json={**body, "ignore_eos": True, **options}, timeout=120
    )
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS
    return answer["choices"][0]["text"], answer["usage"]["nexuskv"]


def from_shared_index(usage: dict[str, Any]) -> dict[str, Any]:
    drafts: dict[str, Any] = usage["drafts"].get("shared_index", {"draft_tokens": 0, "accepted_tokens": 0})
    return drafts


def test_what_was_generated_once_is_drafted_the_next_time_and_after_a_restart(fresh: System) -> None:
    text, usage = complete(fresh)
    assert from_shared_index(usage)["draft_tokens"] == 0
    steps = fresh.metric("nexuskv_steps_total")
    again, usage = complete(fresh)
    assert again == text
    drafts = from_shared_index(usage)
    assert drafts["accepted_tokens"] >= NUM_TOKENS // 2
    assert fresh.metric("nexuskv_steps_total") - steps < NUM_TOKENS // 2
    for name in ("draft", "accepted_draft"):
        metric = fresh.metric(f"nexuskv_{name}_tokens_total", 'source="shared_index"')
        assert metric == drafts[f"{name.removesuffix('_draft')}_tokens"]
    for position, accepted in enumerate(drafts["accepted_per_position"]):
        labels = f'position="{position}",source="shared_index"'
        assert fresh.metric("nexuskv_accepted_draft_tokens_per_pos_total", labels) == accepted

    fresh.child("memory-manager").kill()
    fresh.wait_ready(120)
    after, usage = complete(fresh)
    assert after == text
    assert from_shared_index(usage)["accepted_tokens"] >= NUM_TOKENS // 2
    fresh.wait_idle()
    assert fresh.integrity_violations() == []


async def test_the_client_hears_where_its_drafts_came_from(fresh: System) -> None:
    complete(fresh)
    async with Client(fresh.grpc) as client:
        answer = await client.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    drafts = answer.usage.drafts
    assert drafts["shared_index"].accepted_tokens >= NUM_TOKENS // 2
    assert sum(source.draft_tokens for source in drafts.values()) == answer.usage.draft_tokens
    assert sum(source.accepted_tokens for source in drafts.values()) == answer.usage.accepted_tokens
    for source in drafts.values():
        places = source.accepted_per_position
        assert sum(places) == source.accepted_tokens
        assert list(places) == sorted(places, reverse=True)
        assert max(places, default=0) <= source.num_drafts


def test_another_salt_is_not_drafted_from(fresh: System) -> None:
    complete(fresh)
    _, usage = complete(fresh, cache_salt="somebody else")
    assert from_shared_index(usage)["draft_tokens"] == 0


def test_the_token_stream_shows_the_acceptance_that_the_metrics_have(fresh: System) -> None:
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    for _ in range(2):
        with httpx.stream("POST", f"{fresh.http}/v1/generate/stream", json=body, timeout=120) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    accepted = fresh.metric("vllm:spec_decode_num_accepted_tokens_total")
    drafted = fresh.metric("vllm:spec_decode_num_draft_tokens_total")
    rate = json.loads(lines[-1].removeprefix("data: "))["speculative_acceptance_rate"]
    assert 0 < rate == pytest.approx(accepted / drafted)


def test_tokens_accepted_in_one_step_share_its_time(fresh: System) -> None:
    complete(fresh)
    steps = fresh.metric("nexuskv_steps_total")
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    with httpx.stream("POST", f"{fresh.http}/v1/generate/stream", json=body, timeout=120) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert fresh.metric("nexuskv_steps_total") - steps < NUM_TOKENS // 2
    itl_ms = [event["itl_ms"] for event in events[1:]]
    assert len(itl_ms) == NUM_TOKENS - 1
    assert min(itl_ms) > 0
    for i, event in enumerate(events[1:], 1):
        assert event["tokens_per_sec"] == pytest.approx(i / sum(itl_ms[:i]) * 1e3)
