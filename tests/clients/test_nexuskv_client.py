"""The Python client against the real gRPC door."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from nexuskv.v1 import engine_pb2, inference_pb2
from nexuskv_client import (
    Client,
    DeadlineExceededError,
    FinishReason,
    InvalidArgumentError,
    NexusKVError,
    NotFoundError,
    OverloadedError,
    UnavailableError,
)
from services.frontend.process import Frontend
from tests.fakes import ScriptedEngine
from tests.frontend_system import MODEL, MODULE_LOOP, Eventually

pytestmark = MODULE_LOOP


@pytest_asyncio.fixture(loop_scope="module")
async def client(frontend: Frontend) -> AsyncIterator[Client]:
    async with Client(f"127.0.0.1:{frontend.grpc_port}", default_deadline_s=20) as client:
        yield client


async def test_a_whole_answer(client: Client) -> None:
    answer = await client.generate("Hi", max_tokens=20, seed=1)
    assert answer.text == "The capital of France is Paris."
    assert answer.model == MODEL
    (choice,) = answer.choices
    assert choice.finish_reason is FinishReason.STOP
    assert choice.matched_stop == 2
    assert len(choice.token_ids) == answer.usage.completion_tokens == 8
    assert answer.usage.cached_tokens == 16
    first, last = answer.timings.first_token, answer.timings.last_token
    assert first is not None
    assert last is not None
    assert answer.timings.arrival <= first <= last


async def test_a_stream_says_the_same(client: Client) -> None:
    async with client.stream("Hi", request_id="r1", n=2) as stream:
        deltas = [delta async for delta in stream]
    for index in range(2):
        mine = [d for d in deltas if d.index == index]
        assert "".join(d.text for d in mine) == "The capital of France is Paris."
        assert [d.finish_reason for d in mine if d.finish_reason] == [FinishReason.STOP]
        assert sum(len(d.token_ids) for d in mine) == 8
    assert stream.request_id == "r1"
    assert stream.usage is not None
    assert stream.usage.completion_tokens == 16
    assert stream.timings is not None


async def test_chat_renders_the_template(client: Client, engine: ScriptedEngine) -> None:
    golden = json.loads((Path(__file__).parents[1] / "data" / "greedy_golden.json").read_text())
    case = golden["cases"][0]
    assert await client.chat(case["prompt"]) == "The capital of France is Paris."
    assert list(memoryview(engine.submits[0].prompt_token_ids).cast("i")) == case["prompt_token_ids"]


async def test_developer_is_system(client: Client, engine: ScriptedEngine) -> None:
    for role in ("developer", "system"):
        await client.generate([{"role": role, "content": "Be brief"}, {"role": "user", "content": "Hi"}])
    assert engine.submits[0].prompt_token_ids == engine.submits[1].prompt_token_ids


async def test_token_ids_and_sampling_reach_the_engine(client: Client, engine: ScriptedEngine) -> None:
    await client.generate(
        [81, 82],
        temperature=0.0,
        top_p=0.5,
        top_k=-1,
        min_p=0.25,
        frequency_penalty=-2.0,
        presence_penalty=1.5,
        repetition_penalty=1.25,
        logit_bias={5: -100.0},
        seed=-1,
        max_tokens=9,
        min_tokens=3,
        stop_token_ids=[7],
        bad_words=["Paris"],
        priority=4,
        cache_salt="s",
    )
    submit = engine.submits[0]
    assert submit.prompt_token_ids == bytes([81, 0, 0, 0, 82, 0, 0, 0])
    assert (submit.priority, submit.salt, submit.num_choices) == (4, "s", 1)
    assert submit.sampling == engine_pb2.EngineSampling(
        temperature=0.0,
        top_p=0.5,
        top_k=0,
        min_p=0.25,
        frequency_penalty=-2.0,
        presence_penalty=1.5,
        repetition_penalty=1.25,
        logit_bias={5: -100.0},
        seed=2**64 - 1,
        max_tokens=9,
        min_tokens=3,
        stop_token_ids=[7, 2],
        bad_words=[inference_pb2.TokenIds(ids=[38634]), inference_pb2.TokenIds(ids=[7042])],
    )


async def test_one_string_is_one_bad_word(client: Client, engine: ScriptedEngine) -> None:
    await client.generate("Hi", bad_words="Paris")
    await client.generate("Hi", bad_words=["Paris"])
    first, second = (submit.sampling.bad_words for submit in engine.submits)
    assert first == second


async def test_unset_sampling_is_the_default(client: Client, engine: ScriptedEngine) -> None:
    await client.generate("Hi")
    await client.generate("Hi", ignore_eos=True, max_tokens=3)
    first, second = (submit.sampling for submit in engine.submits)
    assert (first.temperature, first.top_p, first.top_k, first.repetition_penalty) == (1.0, 1.0, 0, 1.0)
    assert not first.HasField("num_logprobs")
    assert first.seed != second.seed
    assert list(first.stop_token_ids) == [2]
    assert list(second.stop_token_ids) == []


async def test_logprobs(client: Client) -> None:
    answer = await client.generate("Hi", logprobs=2)
    entries = answer.choices[0].logprobs
    assert [e.token_id for e in entries] == list(answer.choices[0].token_ids)
    assert entries[0].logprob == -0.5
    assert [t.token_id for t in entries[0].top] == [entries[0].token_id, entries[0].token_id + 1]


async def test_prompt_logprobs(client: Client) -> None:
    answer = await client.generate([81, 82, 83], prompt_logprobs=1, max_tokens=1)
    assert [(e.token_id, e.logprob) for e in answer.prompt_logprobs] == [(82, -1.5), (83, -1.5)]
    async with client.stream([81, 82, 83], prompt_logprobs=1, max_tokens=1) as stream:
        assert [delta.text async for delta in stream] == ["The"]
    assert stream.prompt_logprobs == answer.prompt_logprobs
    assert (await client.generate([81, 82], max_tokens=1)).prompt_logprobs == ()


async def test_stop_string(client: Client, engine: ScriptedEngine, eventually: Eventually) -> None:
    engine.pause_after = 7
    async with client.stream("Hi", stop="France") as stream:
        deltas = [delta async for delta in stream]
    assert "".join(d.text for d in deltas) == "The capital of "
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].matched_stop == "France"
    await eventually(lambda: engine.aborted == [engine.submits[0].request_id])


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("sampling.temperature", {"temperature": -0.5}),
        ("sampling.temperature", {"temperature": float("nan")}),
        ("sampling.top_p", {"top_p": 0.0}),
        ("sampling.top_p", {"top_p": float("inf")}),
        ("sampling.n", {"n": 0}),
        ("sampling.max_tokens", {"max_tokens": 0}),
        ("sampling.stop", {"stop": [""]}),
        ("sampling.stop", {"stop": list("abcde")}),
        ("sampling.bad_words", {"bad_words": [""]}),
        ("sampling.bad_words", {"bad_words": ["a"] * 129}),
        ("sampling.bad_words", {"bad_words": ["a" * 1025, "b" * 1024]}),
        ("sampling.logprobs", {"logprobs": 21}),
        ("sampling.logit_bias", {"logit_bias": {1: 101.0}}),
        ("logit_bias", {"logit_bias": {49152: 1.0}}),
        ("stop_token_ids", {"stop_token_ids": [-1]}),
        ("sampling.regex", {"regex": "a+"}),
        ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
    ],
)
async def test_wrong_fields_are_named(
    client: Client, engine: ScriptedEngine, field: str, sampling: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        await client.generate("Hi", **sampling)
    assert caught.value.field == field
    assert caught.value.reason in ("INVALID_VALUE", "UNSUPPORTED_VALUE")
    with pytest.raises(InvalidArgumentError):
        async for _ in client.stream("Hi", **sampling):
            pass
    assert engine.submits == []


async def test_a_field_that_does_not_exist_is_a_type_error(client: Client) -> None:
    with pytest.raises(TypeError, match="temprature"):
        await client.generate("Hi", temprature=1.0)


async def test_wrong_prompts(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="49151"):
        await client.generate([49152])
    with pytest.raises(InvalidArgumentError, match="at least one token"):
        await client.generate("")
    with pytest.raises(InvalidArgumentError, match="banana"):
        await client.generate([{"role": "banana", "content": "x"}])
    with pytest.raises(InvalidArgumentError) as caught:
        await client.generate([1] * 512)
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"
    assert "512" in str(caught.value)


async def test_unknown_model(client: Client) -> None:
    with pytest.raises(NotFoundError) as caught:
        await client.generate("Hi", model="gpt-9")
    assert caught.value.reason == "MODEL_NOT_FOUND"
    assert (await client.generate("Hi", model="nexuskv-engine-v1")).model == "nexuskv-engine-v1"


async def test_overload_tells_when_to_come_back(client: Client, engine: ScriptedEngine) -> None:
    engine.rejection = engine_pb2.Rejected(
        reason=engine_pb2.Rejected.REASON_QUEUE_FULL, message="full", retry_after_ms=1500
    )
    with pytest.raises(OverloadedError) as caught:
        await client.generate("Hi")
    assert caught.value.retry_after_s == 1.5


async def test_deadline_aborts(client: Client, engine: ScriptedEngine, eventually: Eventually) -> None:
    engine.pause_after = 2
    with pytest.raises(DeadlineExceededError):
        await client.generate("Hi", deadline_s=0.3)
    with pytest.raises(DeadlineExceededError):
        async for _ in client.stream("Hi", deadline_s=0.3):
            pass
    await eventually(lambda: len(engine.aborted) == 2)


async def test_leaving_a_stream_aborts(
    client: Client, engine: ScriptedEngine, frontend: Frontend, eventually: Eventually
) -> None:
    engine.pause_after = 2
    async with client.stream("Hi") as stream:
        async for _ in stream:
            break
    await eventually(lambda: len(engine.aborted) == 1)
    await eventually(lambda: frontend.core.num_active == 0)


async def test_abort_ends_the_stream_itself(client: Client, engine: ScriptedEngine) -> None:
    engine.pause_after = 2
    deltas = []
    async with client.stream("Hi", request_id="mine") as stream:
        async for delta in stream:
            deltas.append(delta)
            if len(deltas) == 1:
                assert await client.abort("mine")
    assert deltas[-1].finish_reason is FinishReason.ABORT
    assert stream.usage is not None
    assert not await client.abort("mine")


async def test_tokenize_and_back(client: Client) -> None:
    assert await client.tokenize("a  12") == [81, 256, 33, 34]
    assert await client.detokenize([81, 256, 33, 34]) == "a  12"
    assert len(await client.tokenize([{"role": "user", "content": "What is the capital of France?"}])) == 37
    with pytest.raises(InvalidArgumentError):
        await client.detokenize([-1])


async def test_models_and_server_info(client: Client) -> None:
    models = await client.list_models()
    assert [(m.id, m.root) for m in models] == [(MODEL, MODEL), ("nexuskv-engine-v1", MODEL)]
    info = await client.server_info()
    assert (info.model, info.max_model_len, info.block_size) == (MODEL, 512, 16)


async def test_engine_lost(client: Client, engine: ScriptedEngine, eventually: Eventually) -> None:
    engine.pause_after = 2
    answer = asyncio.create_task(client.generate("Hi"))
    await eventually(lambda: len(engine.submits) == 1)
    engine.hang_up()
    with pytest.raises(UnavailableError) as caught:
        await answer
    assert caught.value.reason == "ENGINE_LOST"


async def test_nobody_there() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(UnavailableError):
            await client.generate("Hi", deadline_s=5)
        with pytest.raises(NexusKVError):
            await client.list_models(deadline_s=5)


async def test_closing_ends_calls(client: Client, engine: ScriptedEngine, eventually: Eventually) -> None:
    engine.pause_after = 1
    waiting = asyncio.create_task(client.generate("Hi"))
    await eventually(lambda: len(engine.submits) == 1)
    await client.close()
    with pytest.raises((asyncio.CancelledError, NexusKVError)):
        await waiting
    await eventually(lambda: len(engine.aborted) == 1)
