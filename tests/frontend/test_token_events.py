"""POST /v1/generate/stream."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from nexuskv.v1 import engine_pb2
from services.arrays import pack_int32
from services.frontend.process import Frontend
from services.frontend.text.tokenizer import Tokenizer
from tests.fakes import ScriptedEngine
from tests.frontend.http_tools import check_error, strict_json
from tests.frontend_system import MODULE_LOOP, Eventually

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


def says_in_steps(*steps: list[int]) -> Callable[[engine_pb2.SequenceOutput, int], None]:
    """For `ScriptedEngine.annotate`: the tokens of each step."""

    def annotate(output: engine_pb2.SequenceOutput, step: int) -> None:
        output.token_ids = pack_int32(steps[step])

    return annotate


async def test_tokens_of_one_step_share_its_time(http: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.annotate = says_in_steps([504, 3575], [282, 504, 3575], [282])
    async with http.stream("POST", TOKENS, json={"prompt": "Hi", "max_tokens": 3}) as response:
        events = [strict_json(line[6:]) async for line in response.aiter_lines() if line]
    # Nothing is known of how long the second token took after the first.
    assert [e["itl_ms"] is None for e in events] == [True, True, False, False, False, False]
    assert [e["tokens_per_sec"] is None for e in events] == [True, True, False, False, False, False]
    itl_ms = [e["itl_ms"] for e in events[2:]]
    assert itl_ms[0] == itl_ms[1] == itl_ms[2] > 0
    for i, total in enumerate(itertools.accumulate(itl_ms)):
        assert events[2 + i]["tokens_per_sec"] == pytest.approx((i + 1) / total * 1e3)


async def test_what_a_stop_string_cuts_off_takes_no_share(
    http: httpx.AsyncClient, engine: ScriptedEngine, frontend: Frontend, tokenizer: Tokenizer
) -> None:
    seconds_before = seconds_between_outputs(frontend)
    engine.annotate = says_in_steps(
        *map(tokenizer.encode, ("The", " capital of France is Paris", " and so", " on"))
    )
    body = {"prompt": "Hi", "max_tokens": 4, "stop": "of"}
    async with http.stream("POST", TOKENS, json=body) as response:
        events = [strict_json(line[6:]) async for line in response.aiter_lines() if line]
    assert [e["token"] for e in events] == ["The", " capital", " "]
    assert events[-1]["finish_reason"] == "stop"
    seconds = seconds_between_outputs(frontend) - seconds_before
    assert sum(e["itl_ms"] for e in events[1:]) == pytest.approx(seconds * 1e3)


def seconds_between_outputs(frontend: Frontend) -> float:
    (family,) = frontend.core.metrics.itl.collect()
    return sum(sample.value for sample in family.samples if sample.name.endswith("_sum"))


async def test_an_abort_tells_the_text_that_was_held_back(
    http: httpx.AsyncClient, engine: ScriptedEngine, frontend: Frontend, eventually: Eventually
) -> None:
    engine.pause_after = 3
    body = {"prompt": "Hi", "stop": " of Spain", "max_tokens": 9}
    texts: list[str] = []

    async def read() -> None:
        headers = {"x-request-id": "held"}
        async with http.stream("POST", TOKENS, json=body, headers=headers) as response:
            async for line in response.aiter_lines():
                if line:
                    texts.append(strict_json(line[6:])["token"])

    run = asyncio.create_task(read())
    await eventually(lambda: len(texts) == 3)
    assert texts == ["The", " capital", ""]
    assert frontend.core.abort("held")
    await run
    assert "".join(texts) == "The capital of"
