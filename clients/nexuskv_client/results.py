"""What a call answers, as plain Python values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from nexuskv.v1 import inference_pb2 as pb


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class TopLogprob:
    token_id: int
    token: str
    logprob: float


@dataclass(frozen=True)
class TokenLogprob:
    token_id: int
    token: str
    logprob: float
    top: tuple[TopLogprob, ...]


@dataclass(frozen=True)
class DraftUsage:
    num_drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]  # entry i: drafts whose (i + 1)-th token was accepted


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    draft_tokens: int
    accepted_tokens: int
    drafts: Mapping[str, DraftUsage]  # by source: shared_index, prompt_lookup, draft_model
    sequence_ids: Sequence[int]  # of each prompt, for `nexuskv explain`


@dataclass(frozen=True)
class Timings:
    """Seconds since the epoch; None where it did not happen."""

    arrival: float
    first_scheduled: float | None
    first_token: float | None
    last_token: float | None


@dataclass(frozen=True)
class Choice:
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None  # None: a delta with more to come
    matched_stop: str | int | None  # the stop string or the id of the stop token
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class Generation:
    request_id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    timings: Timings
    prompt_logprobs: tuple[TokenLogprob, ...]  # of every prompt token but the first, when asked for

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


@dataclass(frozen=True)
class Model:
    id: str
    root: str  # the model an alias stands for
    max_model_len: int


@dataclass(frozen=True)
class ServerInfo:
    version: str
    model: str
    device: str
    dtype: str
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    uptime_s: float


_FINISH_REASONS: dict[int, FinishReason] = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    pb.FINISH_REASON_ABORT: FinishReason.ABORT,
}


def choice(message: pb.Choice) -> Choice:
    stop = message.matched_stop.WhichOneof("stop")
    return Choice(
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        finish_reason=_FINISH_REASONS.get(message.finish_reason),
        matched_stop=None if stop is None else getattr(message.matched_stop, stop),
        logprobs=logprobs(message.logprobs),
    )


def usage(message: pb.Usage) -> Usage:
    return Usage(
        message.prompt_tokens,
        message.completion_tokens,
        message.cached_tokens,
        message.draft_tokens,
        message.accepted_tokens,
        {
            _source(d.source): DraftUsage(
                d.num_drafts, d.draft_tokens, d.accepted_tokens, tuple(d.accepted_per_position)
            )
            for d in message.drafts
        },
        list(message.sequence_ids),
    )


def _source(source: pb.DraftSource.ValueType) -> str:
    return pb.DraftSource.Name(source).removeprefix("DRAFT_SOURCE_").lower()


def timings(message: pb.Timings) -> Timings:
    return Timings(
        message.arrival,
        message.first_scheduled if message.HasField("first_scheduled") else None,
        message.first_token if message.HasField("first_token") else None,
        message.last_token if message.HasField("last_token") else None,
    )


def generation(message: pb.GenerateResponse) -> Generation:
    choices = tuple(choice(c) for c in message.choices)
    return Generation(
        message.request_id,
        message.model,
        choices,
        usage(message.usage),
        timings(message.timings),
        logprobs(message.prompt_logprobs),
    )


def server_info(message: pb.GetServerInfoResponse) -> ServerInfo:
    return ServerInfo(**{field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields})


def logprobs(messages: Sequence[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            m.token_id,
            m.token,
            m.logprob,
            tuple(TopLogprob(t.token_id, t.token, t.logprob) for t in m.top),
        )
        for m in messages
    )
