"""Reading what the HTTP door answers."""

import json
from array import array
from collections.abc import Callable
from typing import Any

import httpx

from tests.fakes import ScriptedEngine


def strict_json(text: str) -> Any:
    """Refuses NaN and Infinity, which Python's json reads and nobody else."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


async def stream_events(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    """The stream's events in order; `[DONE]` stays a string."""
    async with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else strict_json(line[6:]) for line in lines]


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], **fields}


def chat_text(events: list[Any], index: int = 0) -> str:
    return _joined(events, index, lambda choice: choice["delta"].get("content") or "")


def completion_text(events: list[Any], index: int = 0) -> str:
    return _joined(events, index, lambda choice: choice["text"])


def finish_reasons(events: list[Any], index: int = 0) -> list[str]:
    return [c["finish_reason"] for c in choices(events, index) if c["finish_reason"] is not None]


def choices(events: list[Any], index: int = 0) -> list[Any]:
    chunks = [event for event in events if isinstance(event, dict)]
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    """The one shape of errors; answers its inside."""
    assert response.status_code == status, response.text
    body = strict_json(response.text)
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    return error


def _joined(events: list[Any], index: int, text_of: Callable[[Any], str]) -> str:
    return "".join(text_of(choice) for choice in choices(events, index))


def prompt_ids(engine: ScriptedEngine, number: int = -1) -> list[int]:
    """What the engine was given as its prompt."""
    return array("i", engine.submits[number].prompt_token_ids).tolist()
