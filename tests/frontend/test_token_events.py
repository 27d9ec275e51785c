"""POST /v1/generate/stream."""

from typing import Any

import httpx

from tests.fakes import ScriptedEngine
from tests.frontend.http_tools import check_error, strict_json
from tests.frontend_system import MODULE_LOOP

pytestmark = MODULE_LOOP

TOKENS = "/v1/generate/stream"


async def test_token_events(http: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = lambda submit: [504, 3575, 282]
    async with http.stream("POST", TOKENS, json={"prompt": "Hi", "max_tokens": 32}) as response:
        events = [strict_json(line[6:]) async for line in response.aiter_lines() if line]
    assert len(events) == 32
    assert [e["step"] for e in events] == list(range(1, 33))
    assert [e["is_finished"] for e in events] == [False] * 31 + [True]
    assert events[-1]["finish_reason"] == "length"
    assert "".join(e["token"] for e in events[:3]) == "The capital of"
    first, second = events[:2]
    assert first["itl_ms"] is None
    assert first["tokens_per_sec"] is None
    assert second["itl_ms"] > 0
    assert first["ttft_ms"] == second["ttft_ms"] > 0
    assert (first["allocated_blocks"], first["total_blocks"], first["memory_usage_ratio"]) == (10, 100, 0.1)
    assert first["prefix_cache_hit_ratio"] is None
    assert first["speculative_acceptance_rate"] is None
    assert first["active_block_ids"] == [3, 5]
    assert first["sequence_id"] == 7
    assert engine.submits[0].report_blocks
    assert set(first) == {
        "sequence_id",
        "token",
        "step",
        "tokens_per_sec",
        "ttft_ms",
        "itl_ms",
        "allocated_blocks",
        "total_blocks",
        "memory_usage_ratio",
        "prefix_cache_hit_ratio",
        "speculative_acceptance_rate",
        "active_block_ids",
        "is_finished",
        "finish_reason",
    }


async def test_token_events_with_an_end_and_a_stop(http: httpx.AsyncClient) -> None:
    async def run(**fields: Any) -> list[Any]:
        async with http.stream("POST", TOKENS, json={"prompt": "Hi", **fields}) as response:
            return [strict_json(line[6:]) async for line in response.aiter_lines() if line]

    ended = await run()
    assert [e["token"] for e in ended] == ["The", " capital", " of", " France", " is", " Paris", ".", ""]
    assert [e["finish_reason"] for e in ended] == [None] * 7 + ["stop"]
    stopped = await run(stop="France")
    assert "".join(e["token"] for e in stopped) == "The capital of "
    assert stopped[-1]["finish_reason"] == "stop"
    flushed = await run(stop="France!", max_tokens=4)
    assert "".join(e["token"] for e in flushed) == "The capital of France"
    check_error(await http.post(TOKENS, json={"prompt": "Hi", "n": 2}), 400)
    check_error(await http.post(TOKENS, json={"prompt": ["a", "b"]}), 400)
