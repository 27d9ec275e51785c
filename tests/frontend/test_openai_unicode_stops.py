"""Characters that span tokens, and stop strings that do."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from services.frontend.text.tokenizer import Tokenizer
from tests.fakes import ScriptedEngine
from tests.frontend.http_tools import (
    chat_body,
    chat_text,
    check_error,
    completion_text,
    finish_reasons,
    stream_events,
)
from tests.frontend_system import MODULE_LOOP, Eventually

pytestmark = MODULE_LOOP

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Answer = Callable[[str], list[int]]


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token per byte."""
    ids = {tokenizer.pieces[i]: i for i in range(17, 17 + 256)}
    return [ids[bytes([byte])] for byte in text.encode()]


@pytest.mark.parametrize("text", ["👩‍🚀", "ď", "a👩‍🚀ďz", "日本語"])
async def test_characters_in_pieces(
    http: httpx.AsyncClient, engine: ScriptedEngine, tokenizer: Tokenizer, text: str
) -> None:
    ids = byte_ids(tokenizer, text)
    engine.script = lambda submit: [*ids, 2]
    events = await stream_events(http, CHAT, chat_body(stream=True))
    assert chat_text(events) == text
    assert "\ufffd" not in str(events)
    body = (await http.post(CHAT, json=chat_body())).json()
    assert body["choices"][0]["message"]["content"] == text


async def test_a_character_that_the_limit_cuts_off_is_not_shown(
    http: httpx.AsyncClient, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    ids = byte_ids(tokenizer, "a😀")
    engine.script = lambda submit: ids
    for stream in (True, False):
        response = await http.post(CHAT, json=chat_body(stream=stream, max_tokens=3))
        assert "\ufffd" not in response.text
        assert '"content":"a"' in response.text


@pytest.mark.parametrize(("answer_text", "shown"), [("\u0080", "😀"), (" ok", " ok")])
async def test_a_prompt_that_ends_inside_a_character(
    http: httpx.AsyncClient, engine: ScriptedEngine, tokenizer: Tokenizer, answer_text: str, shown: str
) -> None:
    """The answer may complete the character; otherwise nothing of it is the answer's."""
    prompt = [*tokenizer.encode("Hello "), *byte_ids(tokenizer, "😀")[:3]]
    last_byte = byte_ids(tokenizer, "😀")[3:]
    engine.script = lambda submit: [*(last_byte if shown == "😀" else tokenizer.encode(answer_text)), 2]
    events = await stream_events(http, COMPLETIONS, {"prompt": prompt, "stream": True})
    assert completion_text(events) == shown
    echoed = await stream_events(http, COMPLETIONS, {"prompt": prompt, "stream": True, "echo": True})
    assert completion_text(echoed) == "Hello " + shown


@pytest.mark.parametrize(
    "content",
    [
        r'{"messages":[{"role":"user","content":"\ud800"}]}',
        r'{"messages":[{"role":"user","content":"x"}],"user":"\udc00x"}',
        r'{"messages":[{"role":"user","content":"x"}],"\ud800":1}',
        r'{"messages":[{"role":"user","content":"x"}],"stop":["\ud83d"]}',
    ],
)
async def test_a_lone_surrogate_is_refused(http: httpx.AsyncClient, content: str) -> None:
    response = await http.post(CHAT, content=content, headers={"content-type": "application/json"})
    assert "surrogate" in check_error(response, 400)["message"]


async def test_paired_surrogates_are_a_character(http: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    for content in (r"\ud83d\ude00", "😀"):
        text = f'{{"messages":[{{"role":"user","content":"{content}"}}]}}'
        response = await http.post(CHAT, content=text.encode(), headers={"content-type": "application/json"})
        assert response.status_code == 200
    assert engine.submits[0].prompt_token_ids == engine.submits[1].prompt_token_ids


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("one two three", " two", "one"),
        ("one two three", "wo thr", "one t"),
        ("one two three", ["zzz", "three", "two"], "one "),
        ("one two three", "o", ""),
        ("aaab", "aab", "a"),
        ("one two three", "four", "one two three"),
        ("one two three", "three!", "one two three"),
        ("x 日本語 y", "本語", "x 日"),
        ("one\n\ntwo", "\n\n", "one"),
    ],
)
async def test_stop_strings(
    http: httpx.AsyncClient, answer: Answer, text: str, stop: Any, shown: str
) -> None:
    answer(text)
    events = await stream_events(http, CHAT, chat_body(stream=True, stop=stop, logprobs=True))
    assert chat_text(events) == shown
    assert finish_reasons(events) == ["stop"]
    body = (await http.post(CHAT, json=chat_body(stop=stop))).json()
    assert body["choices"][0]["message"]["content"] == shown
    if shown != text:
        assert body["choices"][0]["stop_reason"] == (stop if isinstance(stop, str) else "two")


async def test_nothing_of_a_stop_string_is_ever_sent(
    http: httpx.AsyncClient, engine: ScriptedEngine, tokenizer: Tokenizer
) -> None:
    engine.script = lambda submit: [*byte_ids(tokenizer, "abcSTOPdef"), 2]
    response = await http.post(CHAT, json=chat_body(stream=True, stop="STOP", logprobs=True, top_logprobs=0))
    sent = response.text.replace('"stop_reason":"STOP"', "")
    assert chat_text(await stream_events(http, CHAT, chat_body(stream=True, stop="STOP"))) == "abc"
    for letter in "STOPdef":
        assert f'"content":"{letter}' not in sent
        assert f'"token":"{letter}' not in sent


async def test_text_that_only_looked_like_a_stop_is_flushed(http: httpx.AsyncClient, answer: Answer) -> None:
    answer("wait for it")
    for stop in ("it is", " it!", "t for it and more"):
        events = await stream_events(http, CHAT, chat_body(stream=True, stop=stop))
        assert chat_text(events) == "wait for it"
    cut = await stream_events(http, CHAT, chat_body(stream=True, stop="for it is", max_tokens=2))
    assert chat_text(cut) == "wait for"
    assert finish_reasons(cut) == ["length"]


async def test_a_string_and_a_list_of_one_are_the_same(http: httpx.AsyncClient, answer: Answer) -> None:
    answer("one two three")
    texts = [
        (await http.post(CHAT, json=chat_body(stop=stop))).json()["choices"][0]["message"]["content"]
        for stop in (" two", [" two"], None, [])
    ]
    assert texts == ["one", "one", "one two three", "one two three"]


@pytest.mark.parametrize(
    "stop", ["", [""], ["a", ""], list("abcde"), 5, [5], {"a": 1}, [["a"]], True, [None]]
)
async def test_stops_that_are_refused(http: httpx.AsyncClient, stop: Any) -> None:
    for path, body in ((CHAT, chat_body(stop=stop)), (COMPLETIONS, {"prompt": "Hi", "stop": stop})):
        assert check_error(await http.post(path, json=body), 400)["param"] == "stop"


async def test_a_stop_string_frees_the_engine(
    http: httpx.AsyncClient, engine: ScriptedEngine, answer: Answer, eventually: Eventually
) -> None:
    answer("one two three")
    engine.pause_after = 2
    await http.post(CHAT, json=chat_body(stop=" two"))
    await eventually(lambda: engine.aborted == [engine.submits[0].request_id])


async def test_usage_counts_up_to_the_stop(http: httpx.AsyncClient, answer: Answer) -> None:
    answer("one two three")
    body = (await http.post(CHAT, json=chat_body(stop="tw"))).json()
    assert body["usage"]["completion_tokens"] == 2


async def test_a_stop_token_has_no_text(http: httpx.AsyncClient, answer: Answer) -> None:
    ids = answer("one two three")
    body = (await http.post(CHAT, json=chat_body(stop_token_ids=[ids[1]], logprobs=True))).json()
    choice = body["choices"][0]
    assert choice["message"]["content"] == "one"
    assert choice["stop_reason"] == ids[1]
    # What the client did not name is no reason to stop: the model just ended.
    ended = (await http.post(CHAT, json=chat_body())).json()["choices"][0]
    assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", None)
    assert [e["token"] for e in choice["logprobs"]["content"]] == ["one"]
    assert body["usage"]["completion_tokens"] == 2


async def test_min_tokens_holds_stop_strings_off(http: httpx.AsyncClient, answer: Answer) -> None:
    answer("one two three one two")
    body = (await http.post(CHAT, json=chat_body(stop="two", min_tokens=3))).json()
    assert body["choices"][0]["message"]["content"] == "one two three one "
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_control_tokens_are_not_shown(http: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.script = lambda submit: [504, 1, 3575]
    hidden = (await http.post(CHAT, json=chat_body(max_tokens=3))).json()
    shown = (await http.post(CHAT, json=chat_body(max_tokens=3, skip_special_tokens=False))).json()
    assert hidden["choices"][0]["message"]["content"] == "The capital"
    assert shown["choices"][0]["message"]["content"] == "The<|im_start|> capital"


async def test_a_choice_that_a_stop_string_ends_is_not_computed_further(
    http: httpx.AsyncClient, engine: ScriptedEngine, answer: Answer, tokenizer: Tokenizer
) -> None:
    answer("The capital of France is Paris." + " And so on" * 50)
    (france,), (spain,) = tokenizer.encode(" France"), tokenizer.encode(" Spain")
    engine.differ = lambda choice, token: spain if choice == 1 and token == france else token
    choices = (await http.post(CHAT, json=chat_body(n=2, stop=["France"]))).json()["choices"]
    assert choices[0]["message"]["content"] == "The capital of "
    assert choices[1]["message"]["content"].startswith("The capital of Spain is Paris. And so on")
    assert [choice["finish_reason"] for choice in choices] == ["stop", "stop"]
    (submit,) = engine.submits
    assert engine.aborted_choices == [(submit.request_id, 0)]
