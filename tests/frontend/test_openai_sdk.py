"""The official SDK against the real door."""

from collections.abc import AsyncIterator

import openai
import pytest
import pytest_asyncio

from nexuskv.v1 import engine_pb2
from services.frontend.process import Frontend
from tests.fakes import ScriptedEngine
from tests.frontend_system import MODEL, MODULE_LOOP

pytestmark = MODULE_LOOP

TEXT = "The capital of France is Paris."


@pytest_asyncio.fixture(loop_scope="module")
async def sdk(frontend: Frontend) -> AsyncIterator[openai.AsyncOpenAI]:
    base_url = f"http://127.0.0.1:{frontend.http_port}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as sdk:
        yield sdk


async def test_chat(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        logprobs=True,
        top_logprobs=2,
    )
    choice = answer.choices[0]
    assert choice.message.content == TEXT
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(e.token for e in choice.logprobs.content) == TEXT
    assert len(choice.logprobs.content[0].top_logprobs) == 2


async def test_chat_stream(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model="nexuskv-engine-v1",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


async def test_the_stream_helper(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], n=2
    ) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert [c.message.content for c in final.choices] == [TEXT, TEXT]


async def test_completions(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=2, logprobs=1)
    assert [c.text for c in answer.choices] == ["The capital"] * 2
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["The", " capital"]
    stream = await sdk.completions.create(model=MODEL, prompt=[81, 82], stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == TEXT


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    models = await sdk.models.list()
    assert [m.id for m in models.data] == [MODEL, "nexuskv-engine-v1"]
    assert (await sdk.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        await sdk.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


async def test_errors(sdk: openai.AsyncOpenAI, engine: ScriptedEngine) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await sdk.chat.completions.create(model=MODEL, messages=[], temperature=9)
    assert caught.value.param in ("messages", "temperature")
    engine.rejection = engine_pb2.Rejected(reason=engine_pb2.Rejected.REASON_DRAINING)
    with pytest.raises(openai.InternalServerError) as lost:
        await sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
    assert lost.value.status_code == 503
    engine.rejection = engine_pb2.Rejected(reason=engine_pb2.Rejected.REASON_QUEUE_FULL, retry_after_ms=1)
    with pytest.raises(openai.RateLimitError):
        await sdk.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])


async def test_an_error_in_a_stream_is_raised(sdk: openai.AsyncOpenAI, engine: ScriptedEngine) -> None:
    engine.pause_after = 3
    stream = await sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True
    )
    texts = []
    with pytest.raises(openai.APIError, match="ended the session"):  # noqa: PT012
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content)
            if texts[-1] == " of":
                engine.hang_up()
    assert "".join(text or "" for text in texts) == "The capital of"
