"""Appends sampled tokens to a sequence and finds out whether they end it."""

from engine.logprobs import concatenate, first_of
from engine.outputs import SequenceOutput
from engine.sampler import Sampled
from engine.sequence import FinishReason, Sequence
from engine.speculation.drafter import DraftTree


def append_tokens(sequence: Sequence, sampled: Sampled, draft: DraftTree | None) -> SequenceOutput:
    """Appends the tokens up to the first that ends the sequence; stop tokens win over the length."""
    sampling, kept, reason = sequence.request.sampling, 0, None
    for token in sampled.tokens:
        sequence.append(token)
        kept += 1
        if token in sampling.stop_token_ids:  # one that comes too early was the only token allowed
            reason = FinishReason.STOP
        elif sequence.num_tokens >= sequence.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            break
    is_first, sequence.started = not sequence.started, True
    logprobs = sampled.logprobs
    return SequenceOutput(
        sequence.request.request_id,
        sequence.index,
        sampled.tokens[:kept],
        reason,
        matched_stop_token=sequence.tokens[-1] if reason is FinishReason.STOP else None,
        logprobs=None if logprobs is None else first_of(logprobs, kept),
        prompt_logprobs=concatenate(sequence.prompt_logprobs)
        if is_first and sequence.prompt_logprobs
        else None,
        num_cached_tokens=sequence.num_cached if is_first else None,
        first_scheduled=sequence.first_scheduled if is_first else None,
        sequence_id=sequence.sequence_id if is_first else None,
        draft_source=None if draft is None else draft.source,
        num_draft_tokens=0 if draft is None else len(draft.tokens),
        num_accepted_tokens=min(kept, len(sampled.tokens) - 1),
        block_table=list(sequence.block_table) if sequence.request.report_blocks else None,
    )
