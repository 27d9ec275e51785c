"""Forms of prompts, and prompts that do not fit."""

from typing import Any

import httpx
import pytest

from tests.fakes import ScriptedEngine
from tests.frontend.http_tools import check_error, prompt_ids
from tests.frontend_system import MAX_MODEL_LEN, MODULE_LOOP

pytestmark = MODULE_LOOP

CHAT, COMPLETIONS, TOKENS = "/v1/chat/completions", "/v1/completions", "/v1/generate/stream"


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
