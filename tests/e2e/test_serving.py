"""The default model through both doors of a running system."""

import asyncio
import contextlib
import json
import random
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from nexuskv_client import Client, FinishReason
from tests.e2e.system import System

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "greedy_golden.json").read_text()
)["cases"]
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."


def chat(system: System, **body: Any) -> dict[str, Any]:
    request = {"model": system.model, "messages": QUESTION, "temperature": 0, **body}
    response = httpx.post(f"{system.http}/v1/chat/completions", json=request, timeout=120)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("model", ["smollm2-135m-instruct", "nexuskv-engine-v1"])
def test_chat_over_http(calm_system: System, model: str) -> None:
    answer = chat(calm_system, model=model)
    choice = answer["choices"][0]
    assert choice["message"]["content"] == ANSWER
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == 37
    assert answer["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("case", GOLDEN, ids=[case["prompt"][:20] for case in GOLDEN])
def test_golden_outputs_through_the_door(system: System, case: dict[str, Any]) -> None:
    text = case["text"].removesuffix("<|im_end|>")
    messages = [{"role": "user", "content": case["prompt"]}]
    answer = chat(system, messages=messages, max_tokens=len(case["output_token_ids"]))
    assert answer["choices"][0]["message"]["content"] == text
    assert answer["usage"]["prompt_tokens"] == len(case["prompt_token_ids"])
    assert answer["usage"]["completion_tokens"] == len(case["output_token_ids"])


async def test_chat_over_grpc_and_streamed(calm_system: System) -> None:
    async with Client(calm_system.grpc) as client:
        whole = await client.generate(QUESTION, temperature=0.0)
        assert whole.choices[0].text == ANSWER
        assert whole.usage.prompt_tokens == 37
        async with client.stream(QUESTION, temperature=0.0) as stream:
            deltas = [delta async for delta in stream]
        assert "".join(delta.text for delta in deltas) == ANSWER
        assert [d.finish_reason for d in deltas if d.finish_reason] == [FinishReason.STOP]
        assert stream.usage is not None
        assert stream.usage.completion_tokens == 8


async def test_a_bad_word_is_gone_from_the_answer(calm_system: System) -> None:
    answer = chat(calm_system, bad_words=["Paris"], max_tokens=40)["choices"][0]["message"]["content"]
    assert answer
    assert "Paris" not in answer
    async with Client(calm_system.grpc) as client:
        again = await client.generate(QUESTION, temperature=0.0, bad_words="Paris", max_tokens=40)
    assert again.text == answer
    assert chat(calm_system)["choices"][0]["message"]["content"] == ANSWER


async def test_the_official_openai_sdk(calm_system: System) -> None:
    async with openai.AsyncOpenAI(base_url=f"{calm_system.http}/v1", api_key="none") as client:
        assert calm_system.model in [model.id for model in (await client.models.list()).data]
        stream = await client.chat.completions.create(
            model=calm_system.model, messages=QUESTION, temperature=0, stream=True
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == ANSWER
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="unknown", messages=QUESTION)


def test_generate_stream_reports_measured_telemetry(calm_system: System) -> None:
    body = {"prompt": "Continuous batching decode iteration", "max_tokens": 32, "ignore_eos": True}
    events: list[dict[str, Any]] = []
    url = f"{calm_system.http}/v1/generate/stream"
    with httpx.stream("POST", url, json=body, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
    assert len(events) == 32
    assert [event["is_finished"] for event in events] == [False] * 31 + [True]
    assert events[-1]["finish_reason"] == "length"
    assert events[0]["ttft_ms"] > 0
    assert all(event["itl_ms"] > 0 for event in events[1:])
    for event in events:
        assert len(event["active_block_ids"]) == len(set(event["active_block_ids"])) >= 1
        assert all(0 <= block < event["total_blocks"] for block in event["active_block_ids"])
    assert len(events[-1]["active_block_ids"]) > len(events[0]["active_block_ids"])


def test_a_second_request_finds_the_long_prefix_cached(calm_system: System) -> None:
    words = " ".join(random.Random(7).choice(("time", "year", "house", "water")) for _ in range(900))

    def cached(question: str) -> tuple[int, int]:
        content = f"{words}\n{question}"
        usage = chat(calm_system, messages=[{"role": "user", "content": content}], max_tokens=2)["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    cached("What is it about?")
    num_prompt, num_cached = cached("Who wrote it?")
    assert num_prompt > 900
    assert num_cached >= 880


async def test_sixteen_requests_share_steps(calm_system: System) -> None:
    steps_before = calm_system.metric("nexuskv_sequences_per_step_count")
    alone_before = calm_system.metric("nexuskv_sequences_per_step_sum")
    async with Client(calm_system.grpc) as client:
        await asyncio.gather(
            *(client.generate(f"Story {i}: once", max_tokens=24, ignore_eos=True) for i in range(16))
        )
    steps = calm_system.metric("nexuskv_sequences_per_step_count") - steps_before
    sequences = calm_system.metric("nexuskv_sequences_per_step_sum") - alone_before
    assert sequences / steps > 8


async def test_clients_that_leave_at_random_moments_free_their_blocks(calm_system: System) -> None:
    rng = random.Random(50)

    async def leave(i: int) -> None:
        body = {
            "model": calm_system.model,
            "messages": [{"role": "user", "content": f"Tell me a story, number {i}. " * rng.randint(1, 30)}],
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": rng.random() < 0.5,
        }
        async with httpx.AsyncClient() as client:
            request = client.post(f"{calm_system.http}/v1/chat/completions", json=body, timeout=120)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(request, rng.uniform(0.01, 3))

    await asyncio.gather(*(leave(i) for i in range(50)))
    calm_system.wait_idle()
