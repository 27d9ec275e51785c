"""A mixed random load through both doors, from clients of which some leave in the middle."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from nexuskv_client import Client
from tests.e2e.system import System

WORDS = ("time", "year", "house", "water", "story", "number", "light", "world", "hand", "city", "the", "of")
BEGINNINGS = [" ".join(random.Random(i).choices(WORDS, k=40 + 60 * i)) for i in range(5)]
STOPS = ("\n", ".", " the", " a ", "ing", "zebra")
# Whoever stays has an answer by then, also behind everybody else; those of low priority are behind whoever
# comes, so for them it counts from the end of the load.
HANG_S = 180

_STATES = ("running", "waiting")


@dataclass(frozen=True)
class Ask:
    prompt: str
    priority: int
    cache_salt: str
    sampling: dict[str, Any]

    @property
    def body(self) -> dict[str, Any]:
        wishes = {"prompt": self.prompt, "priority": self.priority, "cache_salt": self.cache_salt}
        return {**wishes, **self.sampling}


def random_ask(rng: random.Random) -> Ask:
    beginning = rng.choice(BEGINNINGS) if rng.random() < 0.6 else ""
    sampling: dict[str, Any] = {
        "n": rng.choice((1, 1, 1, 2, 3)),
        "max_tokens": rng.choice((1, 8, 24, 60, 100)),
        "temperature": rng.choice((0.0, 1.0)),
        "seed": rng.randrange(1 << 30),
        "ignore_eos": rng.random() < 0.5,
    }
    if rng.random() < 0.4:
        sampling["stop"] = rng.sample(STOPS, rng.randint(1, 3))
    return Ask(
        prompt=f"{beginning} {' '.join(rng.choices(WORDS, k=rng.randint(1, 80)))}",
        priority=rng.choice((0, 0, 0, 1, -1)),
        cache_salt=rng.choice(("", "", "", "salted")),
        sampling=sampling,
    )


@dataclass
class Endings:
    """Every choice ends exactly once, and nothing follows."""

    reasons: dict[int, str] = field(default_factory=dict)

    def see(self, index: int, reason: str | None) -> None:
        assert index not in self.reasons, f"choice {index} goes on after it ended"
        if reason is not None:
            self.reasons[index] = reason

    def check(self, ask: Ask) -> list[str]:
        assert sorted(self.reasons) == list(range(ask.sampling["n"])), "a choice did not end"
        return list(self.reasons.values())


class RandomLoad:
    """Counts how choices ended (`stop`, `length`, `abort`) and how clients left (`left`)."""

    def __init__(self, system: System, seed: int, num_clients: int = 24) -> None:
        self.seen: Counter[str] = Counter()
        self._system = system
        self._seed = seed
        self._num_clients = num_clients

    async def run(self, duration_s: float) -> None:
        """Raises what went wrong for a client that stayed."""
        deadline = time.monotonic() + duration_s
        async with asyncio.TaskGroup() as group:
            for i in range(self._num_clients):
                group.create_task(self._client(random.Random(f"{self._seed}/{i}"), deadline))

    async def _client(self, rng: random.Random, deadline: float) -> None:
        http = httpx.AsyncClient(base_url=self._system.http, timeout=None)
        async with Client(self._system.grpc) as client, http:
            doors: list[Callable[[Ask], Awaitable[list[str]]]] = [
                lambda ask: _grpc_whole(client, ask),
                lambda ask: _grpc_stream(client, ask),
                lambda ask: _grpc_aborted(client, ask, rng),
                lambda ask: _http_whole(http, ask),
                lambda ask: _http_stream(http, ask),
                lambda ask: _token_events(http, ask),
            ]
            while time.monotonic() < deadline:
                ask = random_ask(rng)
                answer = rng.choice(doors)(ask)
                if rng.random() < 0.3:
                    await self._leave(answer, rng.expovariate(1.0))
                else:
                    await self._stay(answer, ask, deadline)

    async def _stay(self, answer: Awaitable[list[str]], ask: Ask, deadline: float) -> None:
        patience = HANG_S if ask.priority >= 0 else HANG_S + max(0.0, deadline - time.monotonic())
        try:
            self.seen.update(await asyncio.wait_for(answer, patience))
        except TimeoutError as error:
            running, waiting = (self._system.metric(f"vllm:num_requests_{what}") for what in _STATES)
            raise AssertionError(f"{ask} hangs, {running:.0f} are running, {waiting:.0f} waiting") from error

    async def _leave(self, answer: Awaitable[list[str]], after_s: float) -> None:
        """The client vanishes in the middle of its call, if that lasts so long."""
        try:
            self.seen.update(await asyncio.wait_for(answer, after_s))
        except TimeoutError:
            self.seen["left"] += 1


async def _grpc_whole(client: Client, ask: Ask) -> list[str]:
    answer = await client.generate(
        ask.prompt, priority=ask.priority, cache_salt=ask.cache_salt, **ask.sampling
    )
    endings = Endings()
    for choice in answer.choices:
        assert choice.finish_reason is not None
        endings.see(choice.index, choice.finish_reason.value)
    return endings.check(ask)


async def _grpc_stream(client: Client, ask: Ask, request_id: str = "") -> list[str]:
    endings = Endings()
    options: dict[str, Any] = {"priority": ask.priority, "cache_salt": ask.cache_salt}
    async with client.stream(ask.prompt, request_id=request_id, **options, **ask.sampling) as stream:
        async for delta in stream:
            endings.see(delta.index, delta.finish_reason and delta.finish_reason.value)
    assert stream.usage is not None
    return endings.check(ask)


async def _grpc_aborted(client: Client, ask: Ask, rng: random.Random) -> list[str]:
    """A stream that somebody else aborts at some time."""
    request_id = f"{rng.getrandbits(64):x}"
    reading = asyncio.create_task(_grpc_stream(client, ask, request_id))
    try:
        await asyncio.wait([reading], timeout=rng.expovariate(1.0))
        await client.abort(request_id)
        return await reading
    finally:
        reading.cancel()


async def _http_whole(http: httpx.AsyncClient, ask: Ask) -> list[str]:
    response = await http.post("/v1/completions", json=ask.body)
    assert response.status_code == 200, response.text
    endings = Endings()
    for choice in response.json()["choices"]:
        endings.see(choice["index"], choice["finish_reason"])
    return endings.check(ask)


async def _http_stream(http: httpx.AsyncClient, ask: Ask) -> list[str]:
    endings = Endings()
    for event in await _events(http, "/v1/completions", {**ask.body, "stream": True}, last="[DONE]"):
        for choice in event["choices"]:
            endings.see(choice["index"], choice["finish_reason"])
    return endings.check(ask)


async def _token_events(http: httpx.AsyncClient, ask: Ask) -> list[str]:
    endings, one = Endings(), Ask(ask.prompt, ask.priority, ask.cache_salt, {**ask.sampling, "n": 1})
    for event in await _events(http, "/v1/generate/stream", one.body):
        assert event["is_finished"] == (event["finish_reason"] is not None)
        endings.see(0, event["finish_reason"])
    return endings.check(one)


async def _events(
    http: httpx.AsyncClient, url: str, body: dict[str, Any], last: str | None = None
) -> list[dict[str, Any]]:
    """All events of a stream that must end well, with `last` where there is such a thing."""
    async with http.stream("POST", url, json=body) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    if last is not None:
        assert lines.pop() == last
    events: list[dict[str, Any]] = [json.loads(line) for line in lines]
    assert not any("error" in event for event in events), events[-1]
    return events
