"""Metrics and telemetry are fed by what happened, and by nothing else."""

import asyncio
import math

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from nexuskv.v1 import engine_pb2, memory_pb2
from services.frontend.metrics import FrontendMetrics, RequestMetrics
from services.frontend.outputs import DraftSource
from services.frontend.peer_metrics import PeerCollector
from services.frontend.peer_stats import Snapshot
from services.frontend.process import Frontend
from tests.fakes import ScriptedEngine
from tests.frontend.http_tools import chat_body, strict_json
from tests.frontend_system import MODEL, MODULE_LOOP, Eventually, frontend_for, http_client, serving

pytestmark = MODULE_LOOP

CHAT = "/v1/chat/completions"
LABELS = {"model_name": MODEL, "engine": "engine-0"}


Key = tuple[str, frozenset[tuple[str, str]]]


async def samples(http: httpx.AsyncClient, path: str = "/metrics") -> dict[Key, float]:
    response = await http.get(path)
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def key(name: str, **labels: str) -> Key:
    return name, frozenset({**LABELS, **labels}.items())


async def test_counters_count_what_happened(
    info: engine_pb2.GetEngineInfoResponse, load_the_tokenizer_once: None
) -> None:
    engine = ScriptedEngine(info, lambda submit: [504, 3575, 2])
    async with serving(engine) as address, frontend_for(address) as frontend, http_client(frontend) as http:
        await frontend.ready()
        before = await samples(http)
        assert key("vllm:generation_tokens_total") not in before
        telemetry = strict_json((await http.get("/v1/telemetry")).text)
        assert telemetry["frontend"]["mean_ttft_ms"] is None
        assert telemetry["frontend"]["acceptance_rate"] is None

        prompt_tokens = 0
        for fields in ({}, {"max_tokens": 2, "stream": True}, {"n": 2}):
            await http.post(CHAT, json=chat_body(**fields))
            prompt_tokens += (await http.post("/tokenize", json=chat_body())).json()["count"]
        await http.post(CHAT, json=chat_body(stop="The"))
        after = await samples(http, "/v1/metrics")

    assert after[key("vllm:generation_tokens_total")] == 3 + 2 + 6 + 1
    assert after[key("vllm:prompt_tokens_total")] == prompt_tokens * 4 / 3
    assert after[key("vllm:prompt_tokens_cached_total")] == 16 * 4
    assert after[key("vllm:request_success_total", finished_reason="stop")] == 4
    assert after[key("vllm:request_success_total", finished_reason="length")] == 1
    assert after[key("vllm:time_to_first_token_seconds_count")] == 4
    assert after[key("vllm:inter_token_latency_seconds_count")] == 2 + 1 + 4
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert after[key(f"vllm:{name}_seconds_count")] == 4


async def test_bucket_edges_are_those_of_existing_boards(http: httpx.AsyncClient) -> None:
    await http.post(CHAT, json=chat_body())
    names = await samples(http)
    edges = [
        labels["le"]
        for name, frozen in names
        if name == "vllm:inter_token_latency_seconds_bucket" and (labels := dict(frozen))
    ]
    assert edges[:4] == ["0.01", "0.025", "0.05", "0.075"]
    assert edges[-2:] == ["80.0", "+Inf"]


async def test_drafts_are_counted_by_source_and_by_place() -> None:
    metrics = FrontendMetrics()
    of_model = RequestMetrics(metrics, (MODEL, "engine-0"))
    of_model.drafted(DraftSource.PROMPT_LOOKUP, 8, 3)
    of_model.drafted(DraftSource.DRAFT_MODEL, 4, 1)
    of_model.drafted(DraftSource.DRAFT_MODEL, 4, 0)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {**LABELS, **labels})

    assert value("vllm:spec_decode_num_draft_tokens_total") == 16
    assert value("vllm:spec_decode_num_accepted_tokens_total") == 4
    for source, drafts, drafted, accepted in (("prompt_lookup", 1, 8, 3), ("draft_model", 2, 8, 1)):
        assert value("nexuskv_drafts_total", source=source) == drafts
        assert value("nexuskv_draft_tokens_total", source=source) == drafted
        assert value("nexuskv_accepted_draft_tokens_total", source=source) == accepted
    by_place = [
        value("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(4)
    ]
    assert by_place == [2, 1, 1, None]
    for source, places in (("prompt_lookup", [1, 1, 1, None]), ("draft_model", [1, None, None, None])):
        name = "nexuskv_accepted_draft_tokens_per_pos_total"
        assert [value(name, source=source, position=str(i)) for i in range(4)] == places
    # Their quotient is the mean accepted length.
    assert value("nexuskv_accepted_length_sum") == 4
    assert value("nexuskv_accepted_length_count") == 3


async def test_failures_have_a_reason(
    http: httpx.AsyncClient, engine: ScriptedEngine, frontend: Frontend
) -> None:
    engine.rejection = engine_pb2.Rejected(reason=engine_pb2.Rejected.REASON_QUEUE_FULL)
    await http.post(CHAT, json=chat_body())
    found = await samples(http)
    assert found[key("nexuskv_request_failures_total", code="RESOURCE_EXHAUSTED", reason="QUEUE_FULL")] == 1


async def test_a_request_fails_once(
    http: httpx.AsyncClient, engine: ScriptedEngine, eventually: Eventually
) -> None:
    failed = "nexuskv_request_failures_total"

    async def failures() -> dict[Key, float]:
        return {name: value for name, value in (await samples(http)).items() if name[0] == failed}

    before = await failures()
    engine.pause_after = 1
    run = asyncio.create_task(http.post("/v1/completions", json={"prompt": ["one", "two", "three"]}))
    await eventually(lambda: len(engine.submits) == 3)
    engine.hang_up()
    assert (await run).status_code == 503
    after = await failures()
    changed = {name: value - before.get(name, 0) for name, value in after.items()}
    assert {name: value for name, value in changed.items() if value} == {
        key(failed, code="UNAVAILABLE", reason="ENGINE_LOST"): 1
    }


async def test_prompts_without_an_answer_are_counted(http: httpx.AsyncClient) -> None:
    names = [key("vllm:prompt_tokens_total"), key("vllm:prompt_tokens_cached_total")]
    before = await samples(http)
    body = {"prompt": [504, 3575, 282], "max_tokens": 0, "echo": True, "logprobs": 1}
    usage = (await http.post("/v1/completions", json=body)).json()["usage"]
    after = await samples(http)
    assert [after[name] - before.get(name, 0) for name in names] == [usage["prompt_tokens"], 16]


async def test_the_mean_latency_is_of_tokens(http: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    def annotate(output: engine_pb2.SequenceOutput, step: int) -> None:
        output.token_ids = output.token_ids * (4 if step else 1)

    async def mean_itl_ms_and_seconds() -> tuple[float, float]:
        telemetry = strict_json((await http.get("/v1/telemetry")).text)
        return telemetry["frontend"]["mean_itl_ms"], (await samples(http))[
            key("vllm:inter_token_latency_seconds_sum")
        ]

    await http.post(CHAT, json=chat_body(max_tokens=2))
    mean, seconds = await mean_itl_ms_and_seconds()
    num_tokens = seconds / mean * 1e3
    engine.annotate = annotate
    await http.post(CHAT, json=chat_body(max_tokens=3))
    mean, seconds = await mean_itl_ms_and_seconds()
    assert seconds / mean * 1e3 - num_tokens == pytest.approx(8)


async def test_the_engines_figures(http: httpx.AsyncClient, engine: ScriptedEngine) -> None:
    engine.load = engine_pb2.GetLoadResponse(
        num_running=3,
        num_waiting=2,
        num_preemptions=1,
        num_steps=9,
        pool=engine_pb2.PoolState(num_blocks=100, num_free=75, num_query_tokens=50, num_hit_tokens=20),
        tokens_per_step=engine_pb2.Histogram(bounds=[1, 8], counts=[4, 3, 2], sum=60),
    )
    found = await samples(http)
    assert found[key("vllm:num_requests_running")] == 3
    assert found[key("vllm:num_requests_waiting")] == 2
    assert found[key("vllm:kv_cache_usage_perc")] == 0.25
    assert found[key("vllm:prefix_cache_queries_total")] == 50
    assert found[key("vllm:prefix_cache_hits_total")] == 20
    assert found[key("vllm:num_preemptions_total")] == 1
    assert [found[key("vllm:iteration_tokens_total_bucket", le=le)] for le in ("1", "8", "+Inf")] == [4, 7, 9]
    assert found[key("vllm:iteration_tokens_total_sum")] == 60
    telemetry = strict_json((await http.get("/v1/telemetry")).text)
    assert telemetry["engine"]["num_running"] == 3
    assert telemetry["engine"]["pool"]["num_free"] == 75
    assert telemetry["memory_manager"] is None
    assert telemetry["ready"] is True


async def test_the_memory_managers_figures() -> None:
    stats = memory_pb2.GetStatsResponse(bytes_of_state=5)
    stats.engines.add(
        engine_id="engine-0",
        num_free=7,
        num_ready=2,
        num_evictions=3,
        tenants=[memory_pb2.GetStatsResponse.Tenant(tenant="t", num_blocks=4)],
    )
    families = list(PeerCollector(Snapshot(None, stats), None).collect())
    values = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}
    assert values["nexuskv_blocks", "engine-0", "free"] == 7
    assert values["nexuskv_evictions_total", "engine-0"] == 3
    assert values["nexuskv_tenant_blocks", "engine-0", "t"] == 4
    assert values["nexuskv_memory_state_bytes",] == 5
    assert not any(math.isnan(value) for value in values.values())
    assert list(PeerCollector(Snapshot(None, None), None).collect()) == []
