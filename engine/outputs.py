"""What a step hands to whoever asked for tokens."""

from dataclasses import dataclass

from engine.logprobs import Logprobs
from engine.sequence import FinishReason
from engine.speculation.drafter import DraftSource


@dataclass(frozen=True)
class SequenceOutput:
    request_id: str
    index: int  # choice
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    matched_stop_token: int | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None  # of prompt[1:], with the first output
    num_cached_tokens: int | None = None  # with the first output
    first_scheduled: float | None = None  # seconds since the epoch, with the first output
    sequence_id: int | None = None  # with the first output
    block_table: list[int] | None = None
    draft_source: DraftSource | None = None  # of the step's draft tokens
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    error: str = ""  # why the engine, not the client, aborted it
