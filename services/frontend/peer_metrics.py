"""What engine and memory manager say, as Prometheus metrics. A peer that is silent has no metrics."""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from nexuskv.v1 import engine_pb2, memory_pb2
from services.frontend.metrics import LABELS
from services.frontend.peer_stats import Snapshot
from services.frontend.served_model import ServedModel

_MEMORY_LABELS = ("engine",)
_BLOCK_STATES = ("free", "private", "ready", "fenced", "quarantined")


class PeerCollector(CollectorRegistry):
    """A registry of one moment."""

    def __init__(self, snapshot: Snapshot, model: ServedModel | None) -> None:
        super().__init__()
        self._snapshot = snapshot
        self._model = model

    def collect(self) -> Iterator[Metric]:
        load, memory = self._snapshot
        if load is not None and self._model is not None:
            yield from _engine_metrics(load, (self._model.name, self._model.info.engine_id))
        if memory is not None:
            yield from _memory_metrics(memory)


def _engine_metrics(load: engine_pb2.GetLoadResponse, labels: tuple[str, str]) -> Iterator[Metric]:
    pool = load.pool
    gauges: list[tuple[str, str, float]] = [
        ("vllm:num_requests_running", "Sequences that run.", load.num_running),
        ("vllm:num_requests_waiting", "Requests that wait.", load.num_waiting),
    ]
    if pool.num_blocks:
        usage = 1 - pool.num_free / pool.num_blocks
        gauges.append(("vllm:kv_cache_usage_perc", "Share of blocks that sequences use, 0 to 1.", usage))
    counters = [
        ("vllm:prefix_cache_queries", "Prompt tokens looked up in the cache.", pool.num_query_tokens),
        ("vllm:prefix_cache_hits", "Prompt tokens found in the cache.", pool.num_hit_tokens),
        ("vllm:num_preemptions", "Preemptions.", load.num_preemptions),
        ("nexuskv_steps", "Steps of the engine.", load.num_steps),
        ("nexuskv_prefill_tokens", "Prompt tokens computed.", load.num_prefill_tokens),
        ("nexuskv_decode_tokens", "Tokens generated.", load.num_decode_tokens),
    ]
    histograms = [
        (
            "vllm:iteration_tokens_total",
            "Tokens computed in one step, drafted ones among them.",
            load.tokens_per_step,
        ),
        ("nexuskv_sequences_per_step", "Sequences of one step.", load.sequences_per_step),
        ("nexuskv_step_seconds", "Time of one step.", load.step_seconds),
        ("nexuskv_abort_seconds", "From an abort until its blocks were back.", load.abort_seconds),
    ]
    for name, help, value in gauges:
        yield _gauge(name, help, labels, value)
    for name, help, count in counters:
        yield _counter(name, help, labels, count)
    for name, help, histogram in histograms:
        yield _histogram(name, help, labels, histogram)


def _memory_metrics(stats: memory_pb2.GetStatsResponse) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "nexuskv_memory_state_bytes", "Size of the memory manager's state.", stats.bytes_of_state
    )
    yield GaugeMetricFamily("nexuskv_draft_index_bytes", "Size of the draft index.", stats.draft_index_bytes)
    if stats.HasField("journal_bytes"):
        yield GaugeMetricFamily("nexuskv_journal_bytes", "Size of the journal.", stats.journal_bytes)
    blocks = GaugeMetricFamily(
        "nexuskv_blocks", "Blocks of the pool by state.", labels=(*_MEMORY_LABELS, "state")
    )
    tenant_blocks = GaugeMetricFamily(
        "nexuskv_tenant_blocks", "Blocks charged to a tenant.", labels=(*_MEMORY_LABELS, "tenant")
    )
    for engine in stats.engines:
        for state in _BLOCK_STATES:
            blocks.add_metric((engine.engine_id, state), getattr(engine, f"num_{state}"))
        for tenant in engine.tenants:
            tenant_blocks.add_metric((engine.engine_id, tenant.tenant), tenant.num_blocks)
    yield blocks
    yield tenant_blocks
    yield from _per_engine(stats)


def _per_engine(stats: memory_pb2.GetStatsResponse) -> Iterator[Metric]:
    gauges = [
        ("nexuskv_evictable_blocks", "Cached blocks that can be evicted.", "num_evictable"),
        ("nexuskv_sequences", "Sequences with blocks.", "num_sequences"),
        ("nexuskv_waiting_acquires", "Acquires told to wait.", "num_waiting"),
    ]
    counters = [
        ("nexuskv_evictions", "Blocks evicted.", "num_evictions"),
        ("nexuskv_forks", "Sequences forked.", "num_forks"),
        ("nexuskv_coalesced_tokens", "Tokens computed once for several requests.", "num_coalesced_tokens"),
        ("nexuskv_truncated_blocks", "Blocks given back by a truncation.", "num_truncated_blocks"),
        ("nexuskv_replaced_blocks", "Blocks replaced by an equal shared one.", "num_replaced_blocks"),
    ]
    for name, help, field in gauges:
        gauge = GaugeMetricFamily(name, help, labels=_MEMORY_LABELS)
        for engine in stats.engines:
            gauge.add_metric((engine.engine_id,), getattr(engine, field))
        yield gauge
    for name, help, field in counters:
        counter = CounterMetricFamily(name, help, labels=_MEMORY_LABELS)
        for engine in stats.engines:
            counter.add_metric((engine.engine_id,), getattr(engine, field))
        yield counter


def _gauge(name: str, help: str, labels: tuple[str, ...], value: float) -> Metric:
    family = GaugeMetricFamily(name, help, labels=LABELS)
    family.add_metric(labels, value)
    return family


def _counter(name: str, help: str, labels: tuple[str, ...], value: float) -> Metric:
    family = CounterMetricFamily(name, help, labels=LABELS)
    family.add_metric(labels, value)
    return family


def _histogram(name: str, help: str, labels: tuple[str, ...], histogram: engine_pb2.Histogram) -> Metric:
    """Prometheus counts cumulatively; the engine counts per bucket."""
    family = HistogramMetricFamily(name, help, labels=LABELS)
    bounds = [*(f"{bound:.17g}" for bound in histogram.bounds), "+Inf"]
    if histogram.counts:
        buckets = list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
        family.add_metric(labels, buckets, histogram.sum)
    return family
