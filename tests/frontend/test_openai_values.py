"""Values of fields: what is honoured, what is refused and how."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.fakes import ScriptedEngine
from tests.frontend.http_tools import chat_body, check_error
from tests.frontend_system import MODULE_LOOP

pytestmark = MODULE_LOOP

CHAT, COMPLETIONS, TOKENS = "/v1/chat/completions", "/v1/completions", "/v1/generate/stream"
JSON = {"content-type": "application/json"}


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
OTHERS = ["stream", "stream_options", "ignore_eos", "logit_bias", "stop_token_ids", "bad_words", "cache_salt"]
WRONG = ['"x"', "[]", "{}", "true", "1e308", "-1e308", "1e400", "NaN", "Infinity", "-Infinity", "[[1]]"]
ALLOWED = {("stream", "true"), ("ignore_eos", "true"), ("cache_salt", '"x"')} | {
    *((name, "{}") for name in ("logit_bias",)),
    ("stop_token_ids", "[]"),
    ("bad_words", "[]"),
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
        ("bad_words", ["a", ""]),
        ("bad_words", ["a", None]),
        ("bad_words", ["a"] * 129),
        ("bad_words", ["a" * 1025, "b" * 1024]),
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
