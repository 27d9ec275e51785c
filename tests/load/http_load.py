"""Load on the HTTP door: streamed and whole chats, completions, metrics, and clients that leave early."""

import json
import random
import time
from typing import Any

from locust import HttpUser, between, task

TOPICS = ("the sea", "paged memory", "a lighthouse", "prime numbers", "an old clock", "rain", "bread")
SHARED = "You are a helpful assistant that answers in one short paragraph. " * 8


class HttpClient(HttpUser):
    wait_time = between(0.05, 0.3)

    @task(6)
    def streamed_chat(self) -> None:
        """Every stream has one finish reason, usage and [DONE]."""
        started = time.perf_counter()
        with self.client.post(
            "/v1/chat/completions",
            json=_chat(stream=True, stream_options={"include_usage": True}),
            stream=True,
            catch_response=True,
            name="chat, streamed",
        ) as response:
            events = [line[6:] for line in response.iter_lines() if line]
            problem = _stream_problem(response.status_code, events)
            if problem:
                response.failure(problem)
                return
        self.environment.events.request.fire(
            request_type="stream",
            name="whole stream",
            response_time=(time.perf_counter() - started) * 1e3,
            response_length=len(events),
            exception=None,
            context={},
        )

    @task(3)
    def whole_chat(self) -> None:
        with self.client.post(
            "/v1/chat/completions", json=_chat(), catch_response=True, name="chat, whole"
        ) as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}")
            elif response.json()["choices"][0]["finish_reason"] not in ("stop", "length"):
                response.failure("no finish reason")

    @task(2)
    def completion(self) -> None:
        body = {"prompt": SHARED + _topic(), "max_tokens": 16, "n": 2, "temperature": 0.7}
        self.client.post("/v1/completions", json=body, name="completion, n = 2")

    @task(1)
    def leave_early(self) -> None:
        """Reads one event and goes; the server has to clean up."""
        with self.client.post(
            "/v1/chat/completions",
            json=_chat(stream=True, max_tokens=200),
            stream=True,
            catch_response=True,
            name="leave early",
        ) as response:
            if response.status_code != 200 or not next(response.iter_lines(), None):
                response.failure(f"status {response.status_code}")

    @task(1)
    def refused(self) -> None:
        with self.client.post(
            "/v1/chat/completions", json=_chat(temperature=-1), catch_response=True, name="refused"
        ) as response:
            if response.status_code == 400 and "temperature" in response.json()["error"]["message"]:
                response.success()
            else:
                response.failure(f"status {response.status_code}")

    @task(1)
    def watch(self) -> None:
        for path in ("/metrics", "/health", "/ready", "/v1/telemetry"):
            self.client.get(path)


def _chat(**fields: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": SHARED},
        {"role": "user", "content": f"Tell me about {_topic()}."},
    ]
    return {"messages": messages, "max_tokens": random.randint(4, 32), **fields}


def _topic() -> str:
    return random.choice(TOPICS)


def _stream_problem(status: int, events: list[bytes]) -> str | None:
    if status != 200:
        return f"status {status}"
    if not events or events[-1] != b"[DONE]":
        return "the stream did not end with [DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    if any("error" in chunk for chunk in chunks):
        return "an error in the stream"
    reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
    if len(reasons) != 1:
        return f"{len(reasons)} finish reasons"
    return None if chunks[-1]["usage"]["completion_tokens"] > 0 else "no usage"
