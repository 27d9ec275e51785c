"""What the engine's door lets through: a session in front of a worker that only takes notes."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from engine.build import ModelInfo
from engine.errors import RequestError
from engine.scheduler import SchedulerLimits
from engine.sequence import Request
from nexuskv.v1 import engine_pb2 as pb
from nexuskv.v1.inference_pb2 import TokenIds
from services.engine.servicer import EngineServicer
from services.engine.worker import EngineWorker

INFO = ModelInfo("m", Path(), "f", "cpu", "float32", 100, SchedulerLimits(8))


class NotingWorker:
    def __init__(self) -> None:
        self.requests: list[Request] = []

    def submit(self, request: Request, decided: Callable[[RequestError | None], None]) -> None:
        self.requests.append(request)

    def abort(self, request_ids: list[str]) -> None:
        pass


async def refusals_and_requests(num_generated: int = 0, **sampling: Any) -> tuple[list[str], list[Request]]:
    worker, servicer = NotingWorker(), EngineServicer(INFO, "engine-0")
    servicer.worker = cast(EngineWorker, worker)
    params = pb.EngineSampling(top_p=1, repetition_penalty=1, max_tokens=5, **sampling)
    submit = pb.Submit(request_id="r", prompt_token_ids=bytes(4), num_choices=1, sampling=params)
    submit.output_token_ids = bytes(4 * num_generated)

    async def requests() -> AsyncIterator[pb.SessionRequest]:
        yield pb.SessionRequest(submit=submit)

    responses = servicer.Session(requests(), cast(Any, None))
    return [response.rejected.message async for response in responses], worker.requests


@pytest.mark.parametrize(
    ("field", "sampling"),
    [
        ("logit_bias", {"logit_bias": {100: 1.0}}),
        ("stop_token_ids", {"stop_token_ids": [-1]}),
        ("bad_words", {"bad_words": [TokenIds(ids=[5]), TokenIds(ids=[5, 100])]}),
        ("bad_words", {"bad_words": [TokenIds(ids=[5]), TokenIds(ids=[-1])]}),
        ("bad_words", {"bad_words": [TokenIds(ids=[5]), TokenIds()]}),
    ],
)
async def test_tokens_that_do_not_exist_are_refused(field: str, sampling: dict[str, Any]) -> None:
    (refusal,), requests = await refusals_and_requests(**sampling)
    assert field in refusal
    assert requests == []


@pytest.mark.parametrize(("num_generated", "is_refused"), [(4, False), (5, True), (6, True)])
async def test_who_takes_over_an_output_may_have_some_left_to_generate(
    num_generated: int, is_refused: bool
) -> None:
    refusals, requests = await refusals_and_requests(num_generated)
    assert len(refusals) == is_refused
    assert len(requests) == (not is_refused)
    assert all("output_token_ids" in refusal for refusal in refusals)


async def test_bad_words_arrive() -> None:
    words = [TokenIds(ids=[5]), TokenIds(ids=[99, 0])]
    refusals, (request,) = await refusals_and_requests(bad_words=words)
    assert refusals == []
    assert request.sampling.bad_words == ((5,), (99, 0))
