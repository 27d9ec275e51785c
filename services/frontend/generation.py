"""One prompt on the engine: what the engine says about it, turned into deltas for its reader."""

import asyncio
from collections.abc import Sequence

import grpc

from nexuskv.v1 import engine_pb2, inference_pb2
from services.errors import ServiceError, unavailable
from services.frontend.choice import Choice
from services.frontend.engine_outputs import unpack_ids, unpack_logprobs
from services.frontend.metrics import RequestMetrics
from services.frontend.outputs import (
    Delta,
    DraftSource,
    DraftUsage,
    FinishReason,
    Step,
    Timings,
    TokenLogprob,
    Usage,
)

_FINISH_REASONS = {
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    inference_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
}
_DRAFT_SOURCES = {
    inference_pb2.DRAFT_SOURCE_SHARED_INDEX: DraftSource.SHARED_INDEX,
    inference_pb2.DRAFT_SOURCE_PROMPT_LOOKUP: DraftSource.PROMPT_LOOKUP,
    inference_pb2.DRAFT_SOURCE_DRAFT_MODEL: DraftSource.DRAFT_MODEL,
}


class Generation:
    """Runs on the event loop. Ends exactly once: every choice finished, or `error` set.

    The reader may be as slow as it likes: what it has not taken is kept in one piece per choice, so a
    request never holds more than its own answer.
    """

    def __init__(
        self,
        submit: engine_pb2.Submit,
        choices: list[Choice],
        prompt_tokens: int,
        wake: asyncio.Event,
        wake_per_token: bool,
        metrics: RequestMetrics,
    ) -> None:
        self.submit = submit  # all that another engine would need to take the request over
        self.choices = choices
        self.usage = Usage(prompt_tokens=prompt_tokens)
        self.timings = Timings(arrival=submit.arrival)
        self.prompt_logprobs: list[TokenLogprob] = []
        self.accepted = False
        self.error: ServiceError | None = None
        self._packed_blocks = b""
        self._blocks: Sequence[int] = ()
        self._wake = wake
        self._wake_per_token = wake_per_token
        self._metrics = metrics
        self.num_open = len(choices)  # choices without a finish reason
        self.num_running = len(choices)  # choices that the engine has not ended

    @property
    def done(self) -> bool:
        return self.num_open == 0 or self.error is not None

    def take(self) -> list[Delta]:
        """What is new for each choice since the last call."""
        return [delta for choice in self.choices if (delta := choice.take()) is not None]

    def accept(self) -> None:
        self.accepted = True
        self._wake.set()

    def fail(self, error: ServiceError) -> None:
        """Ends the request with an error unless it has ended already."""
        if self.done:
            return
        self.error = error
        self._wake.set()

    def abort(self) -> None:
        """Ends every unfinished choice with ABORT, keeping what it has said."""
        if self.done:
            return
        for choice in self.choices:
            if choice.finish_reason is None:
                choice.finish(FinishReason.ABORT, Step())
        self.num_open = 0
        self._finished()

    def take_output(self, output: engine_pb2.SequenceOutput, pool: engine_pb2.PoolState, now: float) -> bool:
        """One step's output for one choice. `now`: seconds since the epoch.

        Answers whether it ended a choice that the engine goes on with: a stop string was found.
        """
        if output.finish_reason:
            self.num_running -= 1
        if output.error:
            self.fail(unavailable(f"the engine gave the request up: {output.error}", "ENGINE_ABORTED"))
            return False
        choice = self.choices[output.index]
        if self.done or choice.finish_reason is not None:
            return False
        self.accepted = True
        if output.HasField("num_cached_tokens") or output.HasField("first_scheduled"):
            self._take_first(output)
        num_before = choice.num_tokens
        self._take_tokens(choice, output, pool, now)
        self._count(choice, output, choice.num_tokens - num_before, now)
        if choice.finish_reason is not None:
            self.num_open -= 1
        if self.num_open == 0:
            self._finished()
        elif self._wake_per_token and choice.has_news():
            self._wake.set()
        return choice.finish_reason is not None and not output.finish_reason

    def _take_first(self, output: engine_pb2.SequenceOutput) -> None:
        if self.timings.first_scheduled is None:
            self.timings.first_scheduled = output.first_scheduled
            self.usage.cached_tokens = output.num_cached_tokens
            self.usage.sequence_ids = [output.sequence_id]
            self._metrics.prompt_computed(self.usage)
        if output.prompt_logprobs:
            prompt = unpack_ids(self.submit.prompt_token_ids)
            self.prompt_logprobs = unpack_logprobs(
                prompt[1:], output.prompt_logprobs, output.prompt_top_logprob_ids, output.prompt_top_logprobs
            )

    def _take_tokens(
        self, choice: Choice, output: engine_pb2.SequenceOutput, pool: engine_pb2.PoolState, now: float
    ) -> None:
        token_ids = unpack_ids(output.token_ids)
        seconds = None if choice.last_token_at is None else now - choice.last_token_at
        step = Step(seconds, self._unpack_blocks(output.block_table), pool)
        logprobs: list[TokenLogprob] = []
        if output.logprobs:
            logprobs = unpack_logprobs(
                token_ids, output.logprobs, output.top_logprob_ids, output.top_logprobs
            )
        stop_token = stop_logprob = None
        if output.HasField("matched_stop_token"):
            stop_token = token_ids.pop()
            stop_logprob = logprobs.pop() if logprobs else None
        choice.push(token_ids, logprobs, step)
        if output.finish_reason and choice.finish_reason is None:
            reason = _FINISH_REASONS[output.finish_reason]
            choice.finish(reason, step, stop_token, stop_logprob)

    def _unpack_blocks(self, packed: bytes) -> Sequence[int]:
        """Steps with the same table share it, so that a reader may be slow."""
        if packed != self._packed_blocks:
            self._packed_blocks, self._blocks = packed, unpack_ids(packed)
        return self._blocks

    def _count(self, choice: Choice, output: engine_pb2.SequenceOutput, num_tokens: int, now: float) -> None:
        usage, timings = self.usage, self.timings
        usage.completion_tokens += num_tokens
        if output.num_draft_tokens:
            source = _DRAFT_SOURCES[output.draft_source]
            num_accepted = min(output.num_accepted_tokens, num_tokens)  # a stop string may have cut the rest
            usage.drafted(source, DraftUsage.of_step(output.num_draft_tokens, num_accepted))
            self._metrics.drafted(source, output.num_draft_tokens, num_accepted)
        if num_tokens == 0:
            return
        if timings.first_token is None:
            timings.first_token = now
            self._metrics.first_token(now - timings.arrival)
        if choice.last_token_at is not None:
            self._metrics.next_tokens(now - choice.last_token_at, num_tokens)
        choice.last_token_at = timings.last_token = now
        self._metrics.generated(num_tokens)

    def _finished(self) -> None:
        for choice in self.choices:
            self._metrics.finished(choice.finish_reason or FinishReason.ABORT)
        self._metrics.timed(self.timings)
        self._wake.set()


def cancelled() -> ServiceError:
    return ServiceError(grpc.StatusCode.CANCELLED, "the client went away", "CLIENT_GONE")
