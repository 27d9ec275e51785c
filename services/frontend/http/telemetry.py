"""One JSON object with what the system looks like now. Silent peers and rates without samples are null."""

from typing import Any

from google.protobuf.message import Message
from prometheus_client import Counter, Histogram
from prometheus_client.metrics import MetricWrapperBase

from services.frontend.core import FrontendCore
from services.frontend.peer_stats import Snapshot


def telemetry_object(core: FrontendCore, snapshot: Snapshot) -> dict[str, Any]:
    return {
        "ready": core.not_ready_reason is None,
        "not_ready_reason": core.not_ready_reason,
        "model": None if core.link.model is None else core.link.model.name,
        "frontend": _frontend(core),
        "engine": _message(snapshot.load),
        "memory_manager": _message(snapshot.memory),
    }


def _frontend(core: FrontendCore) -> dict[str, Any]:
    metrics = core.metrics
    drafted, accepted = _total(metrics.draft_tokens), _total(metrics.accepted_tokens)
    prompt, cached = _total(metrics.prompt_tokens), _total(metrics.cached_tokens)
    timed = metrics.num_timed_tokens
    return {
        "num_active_requests": core.num_active,
        "num_finished_choices": _total(metrics.success),
        "num_failed_requests": _total(metrics.failures),
        "num_prompt_tokens": prompt,
        "num_cached_tokens": cached,
        "num_generated_tokens": _total(metrics.generation_tokens),
        "cached_ratio": cached / prompt if prompt else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        "mean_ttft_ms": _mean_ms(metrics.ttft),
        "mean_itl_ms": _sum(metrics.itl, "_sum") / timed * 1e3 if timed else None,
        "mean_request_ms": _mean_ms(metrics.e2e),
    }


def _total(counter: Counter) -> int:
    return int(_sum(counter, "_total"))


def _mean_ms(histogram: Histogram) -> float | None:
    count = _sum(histogram, "_count")
    return _sum(histogram, "_sum") / count * 1e3 if count else None


def _sum(metric: MetricWrapperBase, suffix: str) -> float:
    """Over all label values."""
    families = metric.collect()
    return sum(s.value for family in families for s in family.samples if s.name.endswith(suffix))


def _message(message: Message | None) -> dict[str, Any] | None:
    """A message's fields by name, numbers as numbers; an optional one that is not set is null."""
    return None if message is None else {f.name: _field(message, f) for f in message.DESCRIPTOR.fields}


def _field(message: Message, field: Any) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if field.is_repeated:
        return [_message(item) if isinstance(item, Message) else item for item in value]
    return _message(value) if isinstance(value, Message) else value
