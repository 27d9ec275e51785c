"""What drafting did for a request, by source and by place, as both doors tell it."""

import httpx
import pytest

from nexuskv.v1 import engine_pb2
from nexuskv.v1.inference_pb2 import DRAFT_SOURCE_DRAFT_MODEL, DRAFT_SOURCE_PROMPT_LOOKUP
from nexuskv_client import Client
from services.arrays import pack_int32
from services.frontend.outputs import DraftSource, DraftUsage, Usage
from services.frontend.process import Frontend
from services.frontend.text.tokenizer import Tokenizer
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
            output.token_ids *= 1 + output.num_accepted_tokens

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


@pytest.mark.parametrize("stop", [" gamma", " beta", " delta", "zebra"])
async def test_what_a_stop_string_cuts_was_not_accepted(
    http: httpx.AsyncClient, engine: ScriptedEngine, tokenizer: Tokenizer, stop: str
) -> None:
    first, *others = tokenizer.encode("alpha", add_bos=False)
    run = tokenizer.encode(" beta gamma delta epsilon", add_bos=False)
    assert others == []
    engine.script = lambda submit: [first, 0]

    def annotate(output: engine_pb2.SequenceOutput, step: int) -> None:
        if step == 1:
            output.draft_source, output.num_draft_tokens = DRAFT_SOURCE_PROMPT_LOOKUP, 9
            output.token_ids, output.num_accepted_tokens = pack_int32(run), len(run) - 1

    engine.annotate = annotate
    body = {"prompt": "Hi", "stop": [stop], "max_tokens": 1 + len(run)}
    usage = (await http.post("/v1/completions", json=body)).json()["usage"]
    drafts = usage["nexuskv"]["drafts"]["prompt_lookup"]
    num_of_run = usage["completion_tokens"] - 1
    assert drafts["accepted_tokens"] == min(num_of_run, len(run) - 1)
    assert drafts["accepted_per_position"] == [1] * drafts["accepted_tokens"]


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
    assert usage["sequence_ids"] == [7] * num_prompts, "what `nexuskv explain` takes"


async def test_usage_over_grpc_is_the_sum_over_choices(frontend: Frontend, drafting: ScriptedEngine) -> None:
    async with Client(f"127.0.0.1:{frontend.grpc_port}", default_deadline_s=20) as client:
        whole = (await client.generate("Hi", n=2)).usage
        async with client.stream("Hi", n=2) as stream:
            async for _ in stream:
                pass
    for usage in (whole, stream.usage):
        assert usage is not None
        assert usage.sequence_ids == [7]
        for source, expected in EXPECTED.items():
            drafts = usage.drafts[source]
            figures = drafts.num_drafts, drafts.draft_tokens, drafts.accepted_tokens
            assert (*figures, drafts.accepted_per_position) == expected
