"""POST /v1/generate/stream: one event per token, with what the engine measured at that moment."""

from collections import Counter

from fastapi import Request, Response

from services.errors import invalid
from services.frontend.active_request import ActiveRequest
from services.frontend.core import FrontendCore
from services.frontend.http import fields
from services.frontend.http.completions import read_prompt, split_prompts
from services.frontend.http.endpoint import read_call
from services.frontend.http.spelling import to_json
from services.frontend.http.streaming import EventStream
from services.frontend.outputs import Delta, FinishReason, Step
from services.frontend.sampling import Sampling

DEFAULT_MAX_TOKENS = 128


class TokenStream:
    def __init__(self, core: FrontendCore, max_body_bytes: int) -> None:
        self._core = core
        self._max_body_bytes = max_body_bytes

    async def post(self, request: Request) -> Response:
        call = await read_call(self._core, request, self._max_body_bytes)
        values = fields.sampling_values(call.body, without=("logprobs", "prompt_logprobs"))
        sampling = Sampling(**{"max_tokens": DEFAULT_MAX_TOKENS, **values})
        if sampling.n != 1:
            raise invalid("n", f"n must be 1 on this endpoint, got {sampling.n}")
        prompts = split_prompts(call.body.get("prompt"))
        if len(prompts) != 1:
            raise invalid("prompt", f"prompt must be one prompt on this endpoint, got {len(prompts)}")
        prompt = await read_prompt(self._core, prompts[0])
        options = call.options("prompt").traced()

        def start() -> ActiveRequest:
            return self._core.start(call.request_id, [prompt], sampling, options)

        return EventStream(start, EventWriter)


class EventWriter:
    """A rate without samples is null, never a made-up number. Tokens of one step share its time."""

    def __init__(self, active: ActiveRequest) -> None:
        (self._generation,) = active.generations
        self._num_tokens = 0
        self._num_timed, self._timed_s = 0, 0.0  # tokens after the first output, and what they took

    def opening(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        if delta.finish_reason is not None and not delta.events:
            # Aborted between two tokens: the end still has to be told.
            return self._event(Step(), None, delta.text, delta.finish_reason)
        num_sharing = Counter(id(event.step) for event in delta.events)
        last = len(delta.events) - 1
        lines = []
        for i, (text, step) in enumerate(delta.events):
            itl_s = None if step.seconds is None else step.seconds / num_sharing[id(step)]
            self._count(itl_s)
            lines.append(self._event(step, itl_s, text, delta.finish_reason if i == last else None))
        return b"".join(lines)

    def closing(self) -> bytes:
        return b""

    def _count(self, itl_s: float | None) -> None:
        self._num_tokens += 1
        if itl_s is not None:
            self._num_timed += 1
            self._timed_s += itl_s

    def _event(self, step: Step, itl_s: float | None, text: str, finish_reason: FinishReason | None) -> bytes:
        value = {
            "sequence_id": next(iter(self._generation.usage.sequence_ids), None),
            "token": text,
            "step": self._num_tokens,
            "tokens_per_sec": self._num_timed / self._timed_s if self._timed_s > 0 else None,
            "ttft_ms": self._ttft_ms(),
            "itl_ms": itl_s * 1e3 if itl_s is not None else None,
            **_pool_figures(step),
            "active_block_ids": step.block_ids,
            "is_finished": finish_reason is not None,
            "finish_reason": finish_reason,
        }
        return b"data: " + to_json(value).encode() + b"\n\n"

    def _ttft_ms(self) -> float | None:
        timings = self._generation.timings
        return (timings.first_token - timings.arrival) * 1e3 if timings.first_token is not None else None


def _pool_figures(step: Step) -> dict[str, float | None]:
    pool = step.pool
    if pool is None or pool.num_blocks == 0:
        names = ("allocated_blocks", "total_blocks", "memory_usage_ratio")
        return dict.fromkeys([*names, "prefix_cache_hit_ratio", "speculative_acceptance_rate"])
    num_allocated = pool.num_blocks - pool.num_free
    return {
        "allocated_blocks": num_allocated,
        "total_blocks": pool.num_blocks,
        "memory_usage_ratio": num_allocated / pool.num_blocks,
        "prefix_cache_hit_ratio": _ratio(pool.num_hit_tokens, pool.num_query_tokens),
        "speculative_acceptance_rate": _ratio(pool.num_accepted_tokens, pool.num_draft_tokens),
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
