"""The prompts that systems are compared with; equal for all of them."""

import random
from typing import NamedTuple

WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city community "
    "name"
).split()


class Workload(NamedTuple):
    """`requests` are (prompt, output tokens); at most `concurrency` of them run at once."""

    concurrency: int
    requests: list[tuple[str, int]]


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def _stories(rng: random.Random, count: int, num_words: int, num_tokens: int) -> list[tuple[str, int]]:
    return [("Write a long story about " + words(rng, num_words), num_tokens) for _ in range(count)]


def _shared_document(rng: random.Random) -> list[tuple[str, int]]:
    document = "You are given a document. " + words(rng, 850)
    return [(f"{document}\nQuestion {i}: what does it say about {rng.choice(WORDS)}?", 32) for i in range(48)]


def _code_to_repeat() -> str:
    code = "".join(
        f"def handler_{i}(request):\n    value = request.get('{WORDS[i]}')\n"
        "    return {'status': 200, 'body': value}\n\n"
        for i in range(8)
    )
    return f"Repeat the following code exactly, unchanged:\n```python\n{code}```"


def workload(name: str) -> Workload:
    """single, conc8, conc16: stories; prefix16: 16 streams over one document of about 900 tokens;
    long: a prompt of about 2,800 tokens; repeat, repeat8: code that must be repeated."""
    rng = random.Random(name)
    makers = {
        "single": lambda: Workload(1, _stories(rng, 3, 24, 96)),
        "conc8": lambda: Workload(8, _stories(rng, 24, 40, 64)),
        "conc16": lambda: Workload(16, _stories(rng, 48, 40, 64)),
        "prefix16": lambda: Workload(16, _shared_document(rng)),
        "long": lambda: Workload(1, [(words(rng, 2800), 16) for _ in range(2)]),
        "repeat": lambda: Workload(1, [(_code_to_repeat(), 160)] * 3),
        "repeat8": lambda: Workload(8, [(f"{_code_to_repeat()}\n# copy {i}", 160) for i in range(16)]),
    }
    return makers[name]()
