"""Requests and outputs of the engine, from and to messages."""

from collections.abc import Iterable

from engine.engine import Load
from engine.logprobs import Logprobs
from engine.metrics import EngineMetrics, Histogram
from engine.outputs import SequenceOutput
from engine.sequence import FinishReason, Request, SamplingParams
from engine.speculation.drafter import DraftSource
from nexuskv.v1 import engine_pb2 as pb
from nexuskv.v1 import inference_pb2
from services.arrays import pack_float32, pack_int32, unpack_int32

_FINISH_REASON = {
    None: inference_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: inference_pb2.FINISH_REASON_ABORT,
}
_DRAFT_SOURCE = {
    None: inference_pb2.DRAFT_SOURCE_UNSPECIFIED,
    DraftSource.SHARED_INDEX: inference_pb2.DRAFT_SOURCE_SHARED_INDEX,
    DraftSource.PROMPT_LOOKUP: inference_pb2.DRAFT_SOURCE_PROMPT_LOOKUP,
    DraftSource.DRAFT_MODEL: inference_pb2.DRAFT_SOURCE_DRAFT_MODEL,
}

# Below this the likeliest token is certain, and numbers no longer are.
MIN_TEMPERATURE = 1e-5


def request_from_pb(submit: pb.Submit, request_id: str) -> Request:
    """`request_id` is unique over all sessions. Raises ValueError when an array is malformed."""
    return Request(
        request_id=request_id,
        prompt=unpack_int32(submit.prompt_token_ids).tolist(),
        output=unpack_int32(submit.output_token_ids).tolist(),
        sampling=_sampling_from_pb(submit.sampling),
        num_choices=submit.num_choices,
        tenant=submit.tenant,
        salt=submit.salt,
        adapter=submit.adapter,
        priority=submit.priority,
        arrival=submit.arrival,
        report_blocks=submit.report_blocks,
        disable_speculation=submit.disable_speculation,
    )


def _sampling_from_pb(s: pb.EngineSampling) -> SamplingParams:
    return SamplingParams(
        temperature=s.temperature if s.temperature >= MIN_TEMPERATURE else 0.0,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        frequency_penalty=s.frequency_penalty,
        presence_penalty=s.presence_penalty,
        repetition_penalty=s.repetition_penalty,
        logit_bias=dict(s.logit_bias),
        seed=s.seed,
        max_tokens=s.max_tokens,
        min_tokens=s.min_tokens,
        stop_token_ids=frozenset(s.stop_token_ids),
        bad_words=tuple(tuple(word.ids) for word in s.bad_words),
        num_logprobs=s.num_logprobs if s.HasField("num_logprobs") else None,
        num_prompt_logprobs=s.num_prompt_logprobs if s.HasField("num_prompt_logprobs") else None,
    )


def step_to_pb(step: int, outputs: Iterable[pb.SequenceOutput], pool: pb.PoolState) -> pb.SessionResponse:
    return pb.SessionResponse(step=pb.StepOutput(step=step, outputs=outputs, pool=pool))


def output_to_pb(output: SequenceOutput, request_id: str) -> pb.SequenceOutput:
    message = pb.SequenceOutput(
        request_id=request_id,
        index=output.index,
        token_ids=pack_int32(output.token_ids),
        finish_reason=_FINISH_REASON[output.finish_reason],
        matched_stop_token=output.matched_stop_token,
        num_cached_tokens=output.num_cached_tokens,
        first_scheduled=output.first_scheduled,
        sequence_id=output.sequence_id,
        draft_source=_DRAFT_SOURCE[output.draft_source],
        num_draft_tokens=output.num_draft_tokens,
        num_accepted_tokens=output.num_accepted_tokens,
        error=output.error,
    )
    if output.block_table is not None:
        message.block_table = pack_int32(output.block_table)
    if output.logprobs is not None:
        message.logprobs, message.top_logprob_ids, message.top_logprobs = _pack(output.logprobs)
    if output.prompt_logprobs is not None:
        packed = _pack(output.prompt_logprobs)
        message.prompt_logprobs, message.prompt_top_logprob_ids, message.prompt_top_logprobs = packed
    return message


def _pack(logprobs: Logprobs) -> tuple[bytes, bytes, bytes]:
    return pack_float32(logprobs.chosen), pack_int32(logprobs.top_ids.ravel()), pack_float32(logprobs.top)


def pool_to_pb(load: Load, metrics: EngineMetrics) -> pb.PoolState:
    return pb.PoolState(
        num_blocks=load.num_blocks,
        num_free=load.num_free,
        num_query_tokens=metrics.num_query_tokens,
        num_hit_tokens=metrics.num_hit_tokens,
        num_draft_tokens=metrics.num_draft_tokens,
        num_accepted_tokens=metrics.num_accepted_tokens,
    )


def load_to_pb(load: Load, metrics: EngineMetrics) -> pb.GetLoadResponse:
    return pb.GetLoadResponse(
        num_running=load.num_running,
        num_waiting=load.num_waiting,
        num_steps=metrics.num_steps,
        num_preemptions=metrics.num_preemptions,
        num_prefill_tokens=metrics.num_prefill_tokens,
        num_decode_tokens=metrics.num_decode_tokens,
        num_draft_tokens=metrics.num_draft_tokens,
        num_accepted_tokens=metrics.num_accepted_tokens,
        pool=pool_to_pb(load, metrics),
        sequences_per_step=_histogram_to_pb(metrics.sequences_per_step),
        tokens_per_step=_histogram_to_pb(metrics.tokens_per_step),
        step_seconds=_histogram_to_pb(metrics.step_seconds),
        abort_seconds=_histogram_to_pb(metrics.abort_seconds),
    )


def _histogram_to_pb(histogram: Histogram) -> pb.Histogram:
    return pb.Histogram(bounds=histogram.bounds, counts=histogram.counts, sum=histogram.sum)
