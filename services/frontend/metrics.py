"""What the frontend measures itself: counters and histograms of the requests it served.

Names, labels and bucket edges are those that boards for vLLM expect where the meaning is the same.
"""

import time

from prometheus_client import CollectorRegistry, Counter, Histogram

from services.errors import ServiceError
from services.frontend.outputs import DraftSource, FinishReason, Timings, Usage
from services.frontend.served_model import ServedModel

LABELS = ("model_name", "engine")
_TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_LENGTH_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)


class FrontendMetrics:
    """Owns a registry; nothing is global."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that ran.")
        self.cached_tokens = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens whose K/V was found in the cache."
        )
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.success = self._counter("vllm:request_success", "Choices that finished.", "finished_reason")
        self.failures = self._counter(
            "nexuskv_request_failures", "Requests that ended with an error.", "code", "reason"
        )
        self.drafts = self._counter("vllm:spec_decode_num_drafts", "Draft runs verified.")
        self.draft_tokens = self._counter("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.")
        self.accepted_tokens = self._counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.")
        self.accepted_per_position = self._counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by place.", "position"
        )
        self.drafts_by_source = self._counter("nexuskv_drafts", "Draft runs verified.", "source")
        self.draft_tokens_by_source = self._counter(
            "nexuskv_draft_tokens", "Draft tokens verified.", "source"
        )
        self.accepted_tokens_by_source = self._counter(
            "nexuskv_accepted_draft_tokens", "Draft tokens accepted.", "source"
        )
        self.accepted_per_position_by_source = self._counter(
            "nexuskv_accepted_draft_tokens_per_pos",
            "Draft tokens accepted, by place.",
            "source",
            "position",
        )
        self.accepted_length = self._histogram(
            "nexuskv_accepted_length", "Draft tokens accepted in one step of a sequence.", _LENGTH_BUCKETS
        )
        self.ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", _TTFT_BUCKETS
        )
        self.itl = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two outputs of one choice.", _ITL_BUCKETS
        )
        self.num_timed_tokens = 0  # in the outputs that `itl` has
        self.e2e = self._latency("e2e_request_latency", "From arrival to the end.")
        self.queue = self._latency("request_queue_time", "From arrival until first scheduled.")
        self.prefill = self._latency("request_prefill_time", "From first scheduled to the first token.")
        self.decode = self._latency("request_decode_time", "From the first token to the last.")
        self.inference = self._latency("request_inference_time", "From first scheduled to the last token.")
        self._bound: dict[tuple[str, str], RequestMetrics] = {}

    def of(self, model: ServedModel) -> "RequestMetrics":
        key = (model.name, model.info.engine_id)
        if key not in self._bound:
            self._bound[key] = RequestMetrics(self, key)
        return self._bound[key]

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, (*LABELS, *labels), registry=self.registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, help, LABELS, buckets=buckets, registry=self.registry)

    def _latency(self, name: str, help: str) -> Histogram:
        return self._histogram(f"vllm:{name}_seconds", help, _REQUEST_BUCKETS)


class RequestMetrics:
    """The same metrics with the labels of one model on one engine."""

    def __init__(self, metrics: FrontendMetrics, labels: tuple[str, str]) -> None:
        self._metrics = metrics
        self._labels = labels
        self._generation_tokens = metrics.generation_tokens.labels(*labels)
        self._ttft = metrics.ttft.labels(*labels)
        self._itl = metrics.itl.labels(*labels)
        self._latencies = {
            name: getattr(metrics, name).labels(*labels)
            for name in ("e2e", "queue", "prefill", "decode", "inference")
        }

    def prompt_computed(self, usage: Usage) -> None:
        self._metrics.prompt_tokens.labels(*self._labels).inc(usage.prompt_tokens)
        self._metrics.cached_tokens.labels(*self._labels).inc(usage.cached_tokens)

    def first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def next_tokens(self, itl_s: float, num_tokens: int) -> None:
        self._itl.observe(itl_s)
        self._metrics.num_timed_tokens += num_tokens

    def generated(self, num_tokens: int) -> None:
        self._generation_tokens.inc(num_tokens)

    def drafted(self, source: DraftSource, num_drafted: int, num_accepted: int) -> None:
        metrics, labels = self._metrics, self._labels
        metrics.drafts.labels(*labels).inc()
        metrics.draft_tokens.labels(*labels).inc(num_drafted)
        metrics.accepted_tokens.labels(*labels).inc(num_accepted)
        metrics.drafts_by_source.labels(*labels, source).inc()
        metrics.draft_tokens_by_source.labels(*labels, source).inc(num_drafted)
        metrics.accepted_tokens_by_source.labels(*labels, source).inc(num_accepted)
        metrics.accepted_length.labels(*labels).observe(num_accepted)
        for position in range(num_accepted):
            metrics.accepted_per_position.labels(*labels, str(position)).inc()
            metrics.accepted_per_position_by_source.labels(*labels, source, str(position)).inc()

    def finished(self, reason: FinishReason) -> None:
        self._metrics.success.labels(*self._labels, reason.value).inc()

    def timed(self, timings: Timings) -> None:
        scheduled, first, last = timings.first_scheduled, timings.first_token, timings.last_token
        spans = {
            "e2e": (timings.arrival, time.time()),
            "queue": (timings.arrival, scheduled),
            "prefill": (scheduled, first),
            "decode": (first, last),
            "inference": (scheduled, last),
        }
        for name, (start, end) in spans.items():
            if start is not None and end is not None:
                self._latencies[name].observe(max(end - start, 0.0))

    def failed(self, error: ServiceError) -> None:
        self._metrics.failures.labels(*self._labels, error.code.name, error.reason).inc()
