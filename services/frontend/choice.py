"""One choice of a request: tokens in, deltas out."""

from collections.abc import Sequence
from typing import NamedTuple

from services.frontend.outputs import Delta, FinishReason, Step, TokenEvent, TokenLogprob
from services.frontend.text.detokenizer import Detokenizer
from services.frontend.text.stop_strings import StopMatcher


class _HeldLogprob(NamedTuple):
    ends_at: int  # characters of text up to the token's end
    logprob: TokenLogprob


class Choice:
    """Detokenizes, watches for stop strings and collects what the reader has not taken yet."""

    def __init__(
        self, index: int, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int, trace: bool
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.last_token_at: float | None = None  # seconds since the epoch
        self.finish_reason: FinishReason | None = None
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None
        self._min_tokens = min_tokens
        self._trace = trace
        self._num_chars = 0  # of text, held back or not
        self._num_released = 0
        self._held_logprobs: list[_HeldLogprob] = []
        self._pending = Delta(index, "", [], [])

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], step: Step) -> None:
        """Takes tokens until a stop string is complete; then `finish_reason` is set and the rest ignored."""
        for i, token_id in enumerate(token_ids):
            text = self._detokenizer.push(token_id)
            released = self._take_token(token_id, text)
            if logprobs:
                self._hold_logprob(logprobs[i], len(text))
            if self._trace:
                self._pending.events.append(TokenEvent(released, step))
            if self._matcher is not None and self._matcher.matched is not None:
                self._end(FinishReason.STOP, self._matcher.matched)
                return

    def finish(
        self,
        reason: FinishReason,
        step: Step,
        stop_token: int | None = None,
        stop_logprob: TokenLogprob | None = None,
    ) -> None:
        """The engine's end of this choice; a stop token is counted but has no text."""
        held = self._matcher.flush() if self._matcher is not None else ""
        self._release(held)
        if stop_token is not None:
            self.num_tokens += 1
            self._pending.token_ids.append(stop_token)
            if self._trace:
                self._pending.events.append(TokenEvent(held, step))
        elif held and self._pending.events:
            last = self._pending.events[-1]
            self._pending.events[-1] = last._replace(text=last.text + held)
        self._end(reason, stop_token)
        if stop_logprob is not None:
            self._pending.logprobs.append(stop_logprob._replace(offset=self._num_chars))

    def has_news(self) -> bool:
        pending = self._pending
        return bool(pending.text or pending.finish_reason or pending.logprobs or pending.events)

    def take(self) -> Delta | None:
        """What came since the last call, in one piece; None when nothing did."""
        if not self.has_news():
            return None
        delta, self._pending = self._pending, Delta(self.index, "", [], [])
        return delta

    def _take_token(self, token_id: int, text: str) -> str:
        self.num_tokens += 1
        self._num_chars += len(text)
        self._pending.token_ids.append(token_id)
        if self._matcher is not None and self.num_tokens >= self._min_tokens:
            text = self._matcher.push(text)
        if text:
            self._release(text)
        return text

    def _release(self, text: str) -> None:
        self._pending.text += text
        self._num_released += len(text)

    def _hold_logprob(self, logprob: TokenLogprob, num_chars: int) -> None:
        """Logprobs spell the token, so they are held as long as its text is."""
        unfinished = 1 if self._detokenizer.holds_bytes else 0
        start = self._num_chars - num_chars
        self._held_logprobs.append(_HeldLogprob(self._num_chars + unfinished, logprob._replace(offset=start)))
        while self._held_logprobs and self._held_logprobs[0].ends_at <= self._num_released:
            self._pending.logprobs.append(self._held_logprobs.pop(0).logprob)

    def _end(self, reason: FinishReason, matched_stop: str | int | None) -> None:
        cut = self._num_released if isinstance(matched_stop, str) else self._num_chars + 1
        self._pending.logprobs += [held.logprob for held in self._held_logprobs if held.logprob.offset < cut]
        self._held_logprobs.clear()
        self.finish_reason = self._pending.finish_reason = reason
        self._pending.matched_stop = matched_stop


class SilentChoice(Choice):
    """For max_tokens = 0: the engine computes the prompt and one token, which nobody gets to see."""

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob], step: Step) -> None:
        pass

    def finish(
        self,
        reason: FinishReason,
        step: Step,
        stop_token: int | None = None,
        stop_logprob: TokenLogprob | None = None,
    ) -> None:
        super().finish(FinishReason.ABORT if reason is FinishReason.ABORT else FinishReason.LENGTH, step)
