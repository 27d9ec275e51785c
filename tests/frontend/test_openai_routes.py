"""Bodies, messages, routes and ids."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from services.frontend.text.tokenizer import Tokenizer
from tests.fakes import ScriptedEngine
from tests.frontend.http_tools import chat_body, check_error, prompt_ids
from tests.frontend_system import MAX_MODEL_LEN, MODEL, MODULE_LOOP

pytestmark = MODULE_LOOP

CHAT, COMPLETIONS, TOKENS = "/v1/chat/completions", "/v1/completions", "/v1/generate/stream"
JSON = {"content-type": "application/json"}


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
