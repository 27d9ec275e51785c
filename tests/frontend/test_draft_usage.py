"""What drafting did for a request, by source and by place, as both doors tell it."""

import httpx
import pytest

from nexuskv.v1 import engine_pb2
from nexuskv.v1.inference_pb2 import DRAFT_SOURCE_DRAFT_MODEL, DRAFT_SOURCE_PROMPT_LOOKUP
from nexuskv_client import Client
from services.frontend.outputs import DraftSource, DraftUsage, Usage
from services.frontend.process import Frontend
from tests.fakes import ScriptedEngine
from tests.frontend_system import MODULE_LOOP

pytestmark = MODULE_LOOP

# By choice and step: source, drafted, accepted.
STEPS = {
    (0, 1): (DRAFT_SOURCE_PROMPT_LOOKUP, 4, 3),
    (1, 1): (DRAFT_SOURCE_DRAFT_MODEL, 2, 0),
    (1, 2): (DRAFT_SOURCE_PROMPT_LOOKUP, 5, 1),
    (0, 3): (DRAFT_SOURCE_DRAFT_MODEL, 2, 2),
}
EXPECTED = {"prompt_lookup": (2, 9, 4, (2, 1, 1)), "draft_model": (2, 4, 2, (1, 1))}


@pytest.fixture
def drafting(engine: ScriptedEngine) -> ScriptedEngine:
    def annotate(output: engine_pb2.SequenceOutput, step: int) -> None:
        if (draft := STEPS.get((output.index, step))) is not None:
            output.draft_source, output.num_draft_tokens, output.num_accepted_tokens = draft

    engine.annotate = annotate
    return engine


async def test_usage_adds_up_place_by_place() -> None:
    total, one, other = Usage(), Usage(), Usage()
    one.drafted(DraftSource.PROMPT_LOOKUP, DraftUsage.of_step(5, 1))
    other.drafted(DraftSource.PROMPT_LOOKUP, DraftUsage.of_step(4, 3))
    other.drafted(DraftSource.DRAFT_MODEL, DraftUsage.of_step(2, 0))
    for usage in (one, other):
        total.add(usage)
    assert total.drafts == {
        DraftSource.PROMPT_LOOKUP: (2, 9, 4, (2, 1, 1)),
        DraftSource.DRAFT_MODEL: (1, 2, 0, ()),
    }
    assert (total.draft_tokens, total.accepted_tokens) == (11, 4)


@pytest.mark.parametrize("num_prompts", [1, 2])
async def test_usage_over_http_is_the_sum_over_choices_and_prompts(
    http: httpx.AsyncClient, drafting: ScriptedEngine, num_prompts: int
) -> None:
    body = {"prompt": ["Hi"] * num_prompts, "n": 2}
    usage = (await http.post("/v1/completions", json=body)).json()["usage"]["nexuskv"]
    assert usage["drafts"] == {
        source: {
            "num_drafts": drafts * num_prompts,
            "draft_tokens": drafted * num_prompts,
            "accepted_tokens": accepted * num_prompts,
            "accepted_per_position": [count * num_prompts for count in places],
        }
        for source, (drafts, drafted, accepted, places) in EXPECTED.items()
    }
    assert usage["accepted_tokens"] == 6 * num_prompts


async def test_usage_over_grpc_is_the_sum_over_choices(frontend: Frontend, drafting: ScriptedEngine) -> None:
    async with Client(f"127.0.0.1:{frontend.grpc_port}", default_deadline_s=20) as client:
        whole = (await client.generate("Hi", n=2)).usage
        async with client.stream("Hi", n=2) as stream:
            async for _ in stream:
                pass
    for usage in (whole, stream.usage):
        assert usage is not None
        for source, expected in EXPECTED.items():
            drafts = usage.drafts[source]
            figures = drafts.num_drafts, drafts.draft_tokens, drafts.accepted_tokens
            assert (*figures, drafts.accepted_per_position) == expected
