"""Measures an OpenAI-compatible server.

    python -m benchmarks.openai_server URL MODEL [--workloads single,conc16,…]

prints a JSON line per workload: output tokens per second, time to first token, inter-token latency.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.workloads import words, workload

WORKLOADS = ("single", "conc8", "conc16", "prefix16", "long", "repeat", "repeat8", "mixed", "seen")

_NUM_SEEN = 5


@dataclass
class Reply:
    ttft_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between deltas
    num_prompt: int = 0
    num_output: int = 0


def _session() -> aiohttp.ClientSession:
    # A new connection each: some servers close those that were kept alive.
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=900))


async def _ask(session: aiohttp.ClientSession, url: str, model: str, prompt: str, num_tokens: int) -> Reply:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    reply, started, last = Reply(), time.perf_counter(), 0.0
    async with session.post(f"{url}/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(await response.text())
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if chunk.get("usage"):
                reply.num_prompt = chunk["usage"]["prompt_tokens"]
                reply.num_output = chunk["usage"]["completion_tokens"]
            if chunk.get("choices") and chunk["choices"][0].get("delta", {}).get("content"):
                now = time.perf_counter()
                if reply.ttft_s == 0.0:
                    reply.ttft_s = now - started
                else:
                    reply.gaps_s.append(now - last)
                last = now
    return reply


async def measure(url: str, model: str, name: str) -> dict[str, Any]:
    """One workload, after a short request that warms the server up."""
    async with _session() as session:
        await _ask(session, url, model, "Hello there", 4)
        if name == "mixed":
            return await _mixed(session, url, model)
        if name == "seen":
            return await _seen(session, url, model)
        concurrency, requests = workload(name)
        gate = asyncio.Semaphore(concurrency)

        async def one(prompt: str, num_tokens: int) -> Reply:
            async with gate:
                return await _ask(session, url, model, prompt, num_tokens)

        started = time.perf_counter()
        replies = await asyncio.gather(*(one(*request) for request in requests))
        wall_s = time.perf_counter() - started
    gaps = [gap for reply in replies for gap in reply.gaps_s]
    num_output = sum(reply.num_output for reply in replies)
    return {
        "workload": name,
        "tok_s": num_output / wall_s,
        "total_tok_s": (num_output + sum(reply.num_prompt for reply in replies)) / wall_s,
        "ttft_p50_ms": statistics.median(reply.ttft_s for reply in replies) * 1e3,
        "itl_p50_ms": statistics.median(gaps) * 1e3 if gaps else None,
        "wall_s": wall_s,
    }


async def _mixed(session: aiohttp.ClientSession, url: str, model: str) -> dict[str, Any]:
    """Six short streams while three prompts of about 1,000 tokens arrive."""

    async def late(i: int) -> Reply:
        await asyncio.sleep(0.6 * (i + 1))
        return await _ask(session, url, model, words(random.Random(i + 99), 1000), 4)

    short = [_ask(session, url, model, f"Tell story number {i}", 96) for i in range(6)]
    replies = await asyncio.gather(*short, *(late(i) for i in range(3)))
    gaps = sorted(gap for reply in replies[:6] for gap in reply.gaps_s)
    return {
        "workload": "mixed",
        "itl_p50_ms": statistics.median(gaps) * 1e3,
        "itl_p99_ms": gaps[int(len(gaps) * 0.99)] * 1e3,
        "long_ttft_p50_ms": statistics.median(reply.ttft_s for reply in replies[6:]) * 1e3,
    }


async def _seen(session: aiohttp.ClientSession, url: str, model: str) -> dict[str, Any]:
    """Prompts that nobody sent before, each then sent again: median tokens per second of each time."""
    rates: list[list[float]] = []
    for number in range(_NUM_SEEN):
        prompt = "Write a long report about " + words(random.Random(f"{time.time()}/{number}"), 24)
        rates.append([])
        for _ in range(2):
            started = time.perf_counter()
            reply = await _ask(session, url, model, prompt, 160)
            rates[-1].append(reply.num_output / (time.perf_counter() - started))
    first, again = (statistics.median(times) for times in zip(*rates, strict=True))
    return {"workload": "seen", "first_tok_s": first, "again_tok_s": again}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    arguments = parser.parse_args()
    for name in arguments.workloads.split(","):
        measured = asyncio.run(measure(arguments.url, arguments.model, name))
        shown = {k: round(v, 2) if isinstance(v, float) else v for k, v in measured.items()}
        print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
