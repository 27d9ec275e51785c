"""InferenceService messages ⇄ the frontend's own types."""

from collections.abc import Sequence
from typing import Any

from nexuskv.v1 import inference_pb2
from services.errors import ServiceError, invalid
from services.frontend.chat_messages import check_messages
from services.frontend.outputs import Delta, DraftSource, FinishReason, Timings, TokenLogprob, Usage
from services.frontend.rules import CACHE_SALT, PRIORITY, unsupported
from services.frontend.sampling import RULES, Sampling
from services.frontend.served_model import ServedModel
from services.frontend.text.tokenizer import Tokenizer

_REPEATED = ("logit_bias", "stop", "stop_token_ids", "bad_words")
_FINISH_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORT,
}
_DRAFT_SOURCES = {
    DraftSource.SHARED_INDEX: inference_pb2.DRAFT_SOURCE_SHARED_INDEX,
    DraftSource.PROMPT_LOOKUP: inference_pb2.DRAFT_SOURCE_PROMPT_LOOKUP,
    DraftSource.DRAFT_MODEL: inference_pb2.DRAFT_SOURCE_DRAFT_MODEL,
}


def to_sampling(params: inference_pb2.SamplingParams) -> Sampling:
    """Raises ServiceError naming the wrong field."""
    if (constraint := params.WhichOneof("constraint")) is not None:
        raise unsupported(f"sampling.{constraint}", "structured output")
    values: dict[str, Any] = {}
    for name, rule in RULES.items():
        if name in _REPEATED:
            continue
        if params.HasField(name):  # type: ignore[arg-type]
            values[name] = rule.check(f"sampling.{name}", getattr(params, name))
    values["logit_bias"] = RULES["logit_bias"].check("sampling.logit_bias", params.logit_bias)
    values["stop"] = RULES["stop"].check("sampling.stop", list(params.stop))
    values["stop_token_ids"] = tuple(params.stop_token_ids)
    values["bad_words"] = RULES["bad_words"].check("sampling.bad_words", list(params.bad_words))
    return Sampling(**values)


def to_messages(chat: inference_pb2.Chat) -> list[dict[str, Any]]:
    return check_messages("chat.messages", [{"role": m.role, "content": m.content} for m in chat.messages])


def to_salt(request: inference_pb2.GenerateRequest) -> str:
    return str(CACHE_SALT.check("cache_salt", request.cache_salt))


def to_priority(request: inference_pb2.GenerateRequest) -> int:
    return int(PRIORITY.check("priority", request.priority))


def no_input() -> ServiceError:
    return invalid("input", "input must be one of text, token_ids and chat")


def from_delta(delta: Delta, tokenizer: Tokenizer) -> inference_pb2.Choice:
    choice = inference_pb2.Choice(index=delta.index, text=delta.text, token_ids=delta.token_ids)
    if delta.logprobs:
        choice.logprobs.extend(from_logprobs(delta.logprobs, tokenizer))
    if delta.finish_reason is not None:
        choice.finish_reason = _FINISH_REASONS[delta.finish_reason]
        if isinstance(delta.matched_stop, str):
            choice.matched_stop.string = delta.matched_stop
        elif delta.matched_stop is not None:
            choice.matched_stop.token_id = delta.matched_stop
    return choice


def from_usage(usage: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        draft_tokens=usage.draft_tokens,
        accepted_tokens=usage.accepted_tokens,
        drafts=[
            inference_pb2.DraftUsage(source=_DRAFT_SOURCES[source], **drafts._asdict())
            for source, drafts in usage.drafts.items()
        ],
        sequence_ids=usage.sequence_ids,
    )


def from_timings(timings: Timings) -> inference_pb2.Timings:
    return inference_pb2.Timings(
        arrival=timings.arrival,
        first_scheduled=timings.first_scheduled,
        first_token=timings.first_token,
        last_token=timings.last_token,
    )


def from_model(model: ServedModel, version: str, uptime_s: float) -> inference_pb2.GetServerInfoResponse:
    info = model.info
    return inference_pb2.GetServerInfoResponse(
        version=version,
        model=info.model,
        device=info.device,
        dtype=info.dtype,
        max_model_len=info.max_model_len,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        uptime_s=uptime_s,
    )


def from_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer) -> list[inference_pb2.TokenLogprob]:
    text = tokenizer.token_text
    return [
        inference_pb2.TokenLogprob(
            token_id=entry.token_id,
            token=text(entry.token_id),
            logprob=entry.logprob,
            top=[
                inference_pb2.TokenLogprob.Top(token_id=i, token=text(i), logprob=value)
                for i, value in entry.top
            ],
        )
        for entry in logprobs
    ]
