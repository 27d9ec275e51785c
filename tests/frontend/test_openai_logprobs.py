"""Logprobs of answers and of prompts."""

from typing import Any

import httpx
import pytest

from services.frontend.text.tokenizer import Tokenizer
from tests.fakes import ScriptedEngine
from tests.frontend.http_tools import chat_body, check_error, completion_text, stream_events, strict_json
from tests.frontend_system import MODULE_LOOP

pytestmark = MODULE_LOOP

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def test_chat_logprobs_without_top(http: httpx.AsyncClient) -> None:
    body = (await http.post(CHAT, json=chat_body(logprobs=True))).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert "".join(e["token"] for e in content) == body["choices"][0]["message"]["content"]
    assert all(e["top_logprobs"] == [] and e["logprob"] == -0.5 for e in content)


async def test_top_logprobs_are_strict_json(http: httpx.AsyncClient) -> None:
    for stream in (True, False):
        response = await http.post(
            CHAT, json=chat_body(logprobs=True, top_logprobs=3, top_p=0.3, stream=stream)
        )
        texts = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        bodies = [strict_json(text) for text in (texts if stream else [response.text])]
        choices = [c for body in bodies for c in body["choices"] if c["logprobs"]]
        entries = [e for c in choices for e in c["logprobs"]["content"]]
        assert len(entries) == 7
        assert all([t["logprob"] for t in e["top_logprobs"]] == [-0.5, -1.5, -9999.0] for e in entries)


async def test_logprobs_of_a_byte_token(
    http: httpx.AsyncClient, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    ids = {tokenizer.pieces[i]: i for i in range(17, 17 + 256)}
    engine.script = lambda submit: [*(ids[bytes([byte])] for byte in "ď".encode()), 2]
    body = (await http.post(CHAT, json=chat_body(logprobs=True))).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [e["bytes"] for e in content] == [[0xC4], [0x8F]]
    assert bytes(byte for e in content for byte in e["bytes"]).decode() == "ď"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
    ],
)
async def test_chat_logprobs_that_are_refused(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str
) -> None:
    assert check_error(await http.post(CHAT, json=chat_body(**fields)), 400)["param"] == param


async def test_completion_logprobs(http: httpx.AsyncClient) -> None:
    body = (await http.post(COMPLETIONS, json={"prompt": "Hi", "logprobs": 2, "max_tokens": 3})).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["The", " capital", " of"]
    assert logprobs["text_offset"] == [0, 3, 11]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"][0]["The"] == -0.5
    assert len(logprobs["top_logprobs"][0]) == 2


async def test_echo_of_prompt_logprobs_alone(http: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    wish = {"prompt": "one two three", "echo": True, "logprobs": 1, "max_tokens": 0}
    body = (await http.post(COMPLETIONS, json=wish)).json()
    choice = body["choices"][0]
    assert choice["text"] == "one two three"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["one", " two", " three"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -1.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 3, 7]
    assert body["usage"]["completion_tokens"] == 0
    after = (await http.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 2})).json()
    assert after["choices"][0]["text"] == "The capital"


@pytest.mark.parametrize("n", [1, 2])
async def test_echo_puts_the_prompt_in_front(http: httpx.AsyncClient, n: int) -> None:
    wish = {"prompt": "one two", "echo": True, "logprobs": 0, "max_tokens": 2, "n": n}
    whole = (await http.post(COMPLETIONS, json=wish)).json()
    events = await stream_events(http, COMPLETIONS, {**wish, "stream": True})
    for index in range(n):
        choice = whole["choices"][index]
        assert choice["text"] == completion_text(events, index) == "one twoThe capital"
        assert choice["logprobs"]["text_offset"] == [0, 3, 7, 10]
        streamed = [
            offset
            for event in events[:-1]
            for c in event["choices"]
            if c["index"] == index and c["logprobs"]
            for offset in c["logprobs"]["text_offset"]
        ]
        assert streamed == [0, 3, 7, 10]


async def test_max_tokens_0_without_echo_says_nothing(http: httpx.AsyncClient) -> None:
    body = (await http.post(COMPLETIONS, json={"prompt": "Hi", "max_tokens": 0})).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("", "length")
    events = await stream_events(http, COMPLETIONS, {"prompt": "Hi", "max_tokens": 0, "stream": True})
    assert completion_text(events) == ""
    assert check_error(await http.post(CHAT, json=chat_body(max_tokens=0)), 400)["param"] == "max_tokens"


async def test_prompt_logprobs(http: httpx.AsyncClient) -> None:
    chat = (await http.post(CHAT, json=chat_body(prompt_logprobs=1))).json()
    assert chat["prompt_logprobs"][0] is None
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    body = (await http.post(COMPLETIONS, json={"prompt": [81, 82], "prompt_logprobs": 0})).json()
    (entry,) = body["choices"][0]["prompt_logprobs"][1].items()
    assert entry == ("82", {"logprob": -1.5, "decoded_token": "b"})
    response = await http.post(CHAT, json=chat_body(prompt_logprobs=1, stream=True))
    assert check_error(response, 400)["param"] == "prompt_logprobs"
