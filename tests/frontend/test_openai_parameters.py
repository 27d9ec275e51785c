"""Fields of requests: what is honoured, what is refused and how."""

import asyncio
import json
from array import array
from typing import Any

import httpx
import pytest

from services.frontend.text.tokenizer import Tokenizer
from tests.fakes import ScriptedEngine
from tests.frontend.http_tools import chat_body, check_error, completion_text, stream_events, strict_json
from tests.frontend_system import MAX_MODEL_LEN, MODEL, MODULE_LOOP

pytestmark = MODULE_LOOP

CHAT, COMPLETIONS, TOKENS = "/v1/chat/completions", "/v1/completions", "/v1/generate/stream"
JSON = {"content-type": "application/json"}


def prompt_ids(engine: ScriptedEngine, number: int = -1) -> list[int]:
    return array("i", engine.submits[number].prompt_token_ids).tolist()


# Logprobs


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


# Prompts


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("a  12", [[81, 256, 33, 34]]),
        ([81, 82], [[81, 82]]),
        ([[81, 82], [83]], [[81, 82], [83]]),
        (["a", "a  12"], [[81], [81, 256, 33, 34]]),
    ],
)
async def test_forms_of_prompts(
    http: httpx.AsyncClient, engine: ScriptedEngine, prompt: Any, ids: list[list[int]]
) -> None:
    body = (await http.post(COMPLETIONS, json={"prompt": prompt, "n": 2})).json()
    assert [prompt_ids(engine, i) for i in range(len(ids))] == ids
    assert [c["index"] for c in body["choices"]] == list(range(2 * len(ids)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert body["usage"]["completion_tokens"] == 16 * len(ids)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        [[]],
        5,
        True,
        {},
        [1.5],
        ["a", 1],
        [[1], "a"],
        [True],
        [[1, "a"]],
        [-1],
        [49152],
        [10**30],
    ],
)
async def test_prompts_that_are_refused(http: httpx.AsyncClient, prompt: Any) -> None:
    for path in (COMPLETIONS, TOKENS):
        assert check_error(await http.post(path, json={"prompt": prompt}), 400)["param"] == "prompt"


async def test_too_many_choices(http: httpx.AsyncClient) -> None:
    response = await http.post(COMPLETIONS, json={"prompt": ["a"] * 1000, "n": 128})
    assert check_error(response, 400)["param"] == "n"
    check_error(await http.post(COMPLETIONS, json={"prompt": ["a"] * 1025}), 400)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_prompt_longer_than_the_context(http: httpx.AsyncClient, path: str) -> None:
    text = "word " * 600
    num_tokens = (await http.post("/tokenize", json={"prompt": text})).json()["count"]
    body: dict[str, Any] = {"prompt": text}
    if path == CHAT:
        body = {"messages": [{"role": "user", "content": text}]}
        num_tokens = (await http.post("/tokenize", json=body)).json()["count"]
    error = check_error(await http.post(path, json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert str(num_tokens) in error["message"]
    assert str(MAX_MODEL_LEN) in error["message"]


async def test_the_answer_has_to_fit_too(http: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    ids = [81] * (MAX_MODEL_LEN - 4)
    fits = await http.post(COMPLETIONS, json={"prompt": ids, "max_tokens": 4})
    assert fits.status_code == 200
    error = check_error(await http.post(COMPLETIONS, json={"prompt": ids, "max_tokens": 5}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    response = await http.post(COMPLETIONS, json={"prompt": [81] * MAX_MODEL_LEN})
    assert check_error(response, 400)["param"] == "prompt"


async def test_a_prompt_far_beyond_the_context_is_refused_by_size(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.frontend.core.EXACT_COUNT_BYTES", 10_000)
    error = check_error(await http.post(COMPLETIONS, json={"prompt": "x" * 100_000}), 400)
    assert error["code"] == "context_length_exceeded"
    assert "at least" in error["message"]


# Values


async def test_max_completion_tokens_wins(http: httpx.AsyncClient) -> None:
    for fields in ({"max_completion_tokens": 2}, {"max_completion_tokens": 2, "max_tokens": 5}):
        body = (await http.post(CHAT, json=chat_body(**fields))).json()
        assert body["usage"]["completion_tokens"] == 2
    response = await http.post(CHAT, json=chat_body(max_completion_tokens=-1))
    assert check_error(response, 400)["param"] == "max_completion_tokens"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("token", ["49152", "-1", "abc", "1.5", "99999999999", ""])
async def test_logit_bias_outside_the_vocabulary(http: httpx.AsyncClient, path: str, token: str) -> None:
    body = chat_body() if path == CHAT else {"prompt": "Hi"}
    response = await http.post(path, json={**body, "logit_bias": {token: 1}})
    assert check_error(response, 400)["param"] == "logit_bias"
    assert (await http.post(path, json={**body, "logit_bias": {"49151": 1}})).status_code == 200


NUMBERS = ["temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"]
INTEGERS = ["top_k", "n", "max_tokens", "min_tokens", "seed", "priority"]
OTHERS = ["stream", "stream_options", "ignore_eos", "logit_bias", "stop_token_ids", "cache_salt"]
WRONG = ['"x"', "[]", "{}", "true", "1e308", "-1e308", "1e400", "NaN", "Infinity", "-Infinity", "[[1]]"]
ALLOWED = {("stream", "true"), ("ignore_eos", "true"), ("cache_salt", '"x"')} | {
    *((name, "{}") for name in ("logit_bias",)),
    ("stop_token_ids", "[]"),
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, TOKENS])
async def test_wrong_values_are_named(http: httpx.AsyncClient, engine: ScriptedEngine, path: str) -> None:
    base = json.dumps(chat_body() if path == CHAT else {"prompt": "Hi"})
    for field in NUMBERS + INTEGERS + OTHERS:
        for value in WRONG:
            if (field, value) in ALLOWED:
                continue
            response = await http.post(path, content=f'{base[:-1]},"{field}":{value}}}', headers=JSON)
            error = check_error(response, 400)
            assert error["param"] == field, (field, value)
            assert field in error["message"]
    assert engine.submits == []
    assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", -0.1),
        ("frequency_penalty", -2.1),
        ("presence_penalty", 2.1),
        ("repetition_penalty", 0),
        ("n", 0),
        ("n", 129),
        ("n", 1.0),
        ("max_tokens", -1),
        ("max_tokens", 10**30),
        ("min_tokens", -1),
        ("seed", 2**63),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"5": True}),
        ("stop_token_ids", [49152]),
        ("stop_token_ids", [True]),
        ("cache_salt", "x" * 257),
        ("model", 5),
    ],
)
async def test_values_out_of_range(http: httpx.AsyncClient, field: str, value: Any) -> None:
    for path, body in ((CHAT, chat_body()), (COMPLETIONS, {"prompt": "Hi"})):
        assert check_error(await http.post(path, json={**body, field: value}), 400)["param"] == field


async def test_null_is_omitted(http: httpx.AsyncClient) -> None:
    nothing = dict.fromkeys(
        [*NUMBERS, *INTEGERS, *OTHERS, "model", "logprobs", "top_logprobs", "stop", "tools"]
    )
    assert (await http.post(CHAT, json=chat_body(**nothing))).status_code == 200
    nothing.pop("top_logprobs")
    assert (await http.post(COMPLETIONS, json={"prompt": "Hi", **nothing})).status_code == 200


async def test_unknown_fields_are_accepted(http: httpx.AsyncClient) -> None:
    extra = {"user": "me", "ignore_eos": False, "metadata": {"a": [1]}, "store": True, "frobnicate": 1.5}
    assert (await http.post(CHAT, json=chat_body(**extra))).status_code == 200


async def test_seed_makes_the_engine_repeat_itself(http: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    for seed in (5, 5, -(2**63), None, None):
        await http.post(CHAT, json=chat_body(seed=seed))
    seeds = [submit.sampling.seed for submit in engine.submits]
    assert seeds[0] == seeds[1] == 5
    assert seeds[2] == 2**63
    assert seeds[3] != seeds[4]


async def test_best_of_is_n(http: httpx.AsyncClient) -> None:
    assert (await http.post(COMPLETIONS, json={"prompt": "Hi", "n": 2, "best_of": 2})).status_code == 200
    for wrong in (3, "x", True):
        response = await http.post(COMPLETIONS, json={"prompt": "Hi", "n": 2, "best_of": wrong})
        assert check_error(response, 400)["param"] == "best_of"


async def test_stream_options_belong_to_streams(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, json=chat_body(stream_options={"include_usage": True}))
    assert check_error(response, 400)["param"] == "stream_options"
    response = await http.post(CHAT, json=chat_body(stream=True, stream_options={"include_usage": 1}))
    assert check_error(response, 400)["param"] == "stream_options.include_usage"


# What is not supported


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
        ("response_format", {"type": "banana"}),
        ("response_format", {}),
        ("response_format", "text"),
        ("response_format", []),
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tools", "x"),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("guided_regex", "a+"),
        ("guided_json", {"type": "object"}),
        ("structured_outputs", {"choice": ["a"]}),
        ("modalities", ["text", "audio"]),
        ("suffix", "end"),
    ],
)
async def test_what_would_be_ignored_is_refused(
    http: httpx.AsyncClient, engine: ScriptedEngine, field: str, value: Any
) -> None:
    engine.pause_after = 2
    running = asyncio.create_task(http.post(CHAT, json=chat_body(stream=True)))
    for path, body in ((CHAT, chat_body()), (COMPLETIONS, {"prompt": "Hi"})):
        assert check_error(await http.post(path, json={**body, field: value}), 400)["param"] == field
    engine.pause_after = 1000
    assert (await running).text.endswith("data: [DONE]\n\n")


async def test_what_asks_for_nothing_is_fine(http: httpx.AsyncClient) -> None:
    fine = {
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "suffix": "",
    }
    assert (await http.post(CHAT, json=chat_body(**fine))).status_code == 200


# Bodies and routes


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, TOKENS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "null",
        "123",
        '"x"',
        "",
        "{",
        '{"a":}',
        "{'a': 1}",
        "\x00",
        "[" * 5000,
        '{"a":1}{"b":2}',
        "\ufeff{}",
    ],
)
async def test_bodies_that_are_not_an_object(http: httpx.AsyncClient, path: str, content: str) -> None:
    response = await http.post(path, content=content.encode(), headers=JSON)
    assert check_error(response, 400)["code"] == "invalid_json"


async def test_bytes_that_are_not_utf8(http: httpx.AsyncClient) -> None:
    response = await http.post(CHAT, content=b'{"messages":"\xff"}', headers=JSON)
    check_error(response, 400)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
async def test_wrong_content_types(http: httpx.AsyncClient, kind: str) -> None:
    response = await http.post(CHAT, content=json.dumps(chat_body()), headers={"content-type": kind})
    assert check_error(response, 400)["code"] == "invalid_content_type"


async def test_right_content_types(http: httpx.AsyncClient) -> None:
    for kind in ("application/json; charset=utf-8", "Application/JSON", "application/vnd.api+json"):
        response = await http.post(CHAT, content=json.dumps(chat_body()), headers={"content-type": kind})
        assert response.status_code == 200


async def test_a_body_that_is_too_large(http: httpx.AsyncClient) -> None:
    body = {"prompt": "x" * (1 << 20)}
    assert check_error(await http.post(COMPLETIONS, json=body), 413)["code"] == "body_too_large"

    async def chunks() -> Any:
        for _ in range(40):
            yield b"x" * (1 << 16)

    response = await http.post(COMPLETIONS, content=chunks(), headers=JSON)
    check_error(response, 413)
    assert (await http.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        {},
        "x",
        [5],
        ["x"],
        [{}],
        [{"role": "user"}],
        [{"role": "banana", "content": "x"}],
        [{"role": ["user"], "content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": [{"text": "x"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
)
async def test_messages_that_are_refused(http: httpx.AsyncClient, messages: Any) -> None:
    error = check_error(await http.post(CHAT, json={"messages": messages}), 400)
    assert error["param"].startswith("messages")


async def test_roles_and_content_parts(
    http: httpx.AsyncClient, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    user = {"role": "user", "content": [{"type": "text", "text": "alpha"}, {"type": "text", "text": "beta"}]}
    for role in ("developer", "system"):
        body = {"messages": [{"role": role, "content": ""}, user]}
        assert (await http.post(CHAT, json=body)).status_code == 200
    assert prompt_ids(engine, 0) == prompt_ids(engine, 1)
    text = tokenizer.decode(prompt_ids(engine))
    assert text == (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nalpha\nbeta<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_golden_chat_prompt(http: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    await http.post(CHAT, json=body)
    assert len(prompt_ids(engine)) == 37
    await http.post(CHAT, json={**body, "add_generation_prompt": False})
    assert len(prompt_ids(engine)) == 33


async def test_models(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()
    assert [m["id"] for m in listed["data"]] == [MODEL, "nexuskv-engine-v1"]
    for name in (MODEL, "nexuskv-engine-v1", MODEL.replace("/", "%2F")):
        assert (await http.get(f"/v1/models/{name}")).json()["root"] == MODEL
    assert check_error(await http.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"
    assert (await http.get(f"{http.base_url}//v1/models")).status_code == 200
    assert (await http.post(f"{http.base_url}//v1/chat/completions", json=chat_body())).status_code == 200


async def test_the_model_field(http: httpx.AsyncClient) -> None:
    for name in (MODEL, "nexuskv-engine-v1"):
        assert (await http.post(CHAT, json=chat_body(model=name))).json()["model"] == name
    assert (await http.post(CHAT, json=chat_body())).json()["model"] == MODEL
    for path in (CHAT, COMPLETIONS, TOKENS, "/tokenize", "/detokenize"):
        error = check_error(await http.post(path, json={**chat_body(), "prompt": "x", "model": "x/y"}), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_unknown_routes_and_methods(http: httpx.AsyncClient) -> None:
    for path in ("/v1/nothing", "/v1/chat", "/docs", "/openapi.json", "/v1/%ff"):
        check_error(await http.get(path), 404)
    response = await http.get(CHAT)
    check_error(response, 405)
    assert response.headers["allow"] == "POST"


async def test_tokenize(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/tokenize", json={"prompt": "a  12"})).json()
    assert answer == {"tokens": [81, 256, 33, 34], "count": 4, "max_model_len": MAX_MODEL_LEN}
    back = (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json()
    assert back == {"prompt": "a  12"}
    assert (await http.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []
    for prompt in (None, 5, [1]):
        assert check_error(await http.post("/tokenize", json={"prompt": prompt}), 400)["param"] == "prompt"
    for wrong in (None, 5, "x", ["x"], [1.0], [-1], [49152], [True]):
        assert check_error(await http.post("/detokenize", json={"tokens": wrong}), 400)["param"] == "tokens"


async def test_request_ids(http: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.pause_after = 2
    headers = {"x-request-id": "same"}
    both = [asyncio.create_task(http.post(CHAT, json=chat_body(), headers=headers)) for _ in range(2)]
    engine.pause_after = 1000
    answers = await asyncio.gather(*both)
    assert [a.json()["choices"][0]["finish_reason"] for a in answers] == ["stop", "stop"]
    assert {a.headers["x-request-id"] for a in answers} == {"same"}
    assert {a.json()["id"] for a in answers} == {"chatcmpl-same"}
    unusable = await http.post(CHAT, json=chat_body(), headers={"x-request-id": "x" * 1000})
    assert len(unusable.headers["x-request-id"]) == 32


async def test_cache_salt_reaches_the_engine(http: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    for salt in ("a", "a", "b", None):
        await http.post(CHAT, json=chat_body(cache_salt=salt))
    assert [submit.salt for submit in engine.submits] == ["a", "a", "b", ""]


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
    assert second["itl_ms"] >= 0
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
