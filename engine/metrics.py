"""Counters and histograms of one engine; every number is counted, none is estimated."""

import bisect
from dataclasses import dataclass, field

from engine.batch import Batch
from engine.outputs import SequenceOutput
from engine.sequence import Sequence

COUNT_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SECONDS_BOUNDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Histogram:
    """Counts per bucket (one more than the bounds) and the sum of what was observed."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass
class EngineMetrics:
    num_steps: int = 0
    num_preemptions: int = 0
    num_prefill_tokens: int = 0  # of prompts, computed; cached ones are not among them
    num_decode_tokens: int = 0  # kept, drafted ones that were right among them
    num_query_tokens: int = 0  # prompt tokens of admitted sequences
    num_hit_tokens: int = 0  # of those, found in the cache
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    sequences_per_step: Histogram = field(default_factory=lambda: Histogram(COUNT_BOUNDS))
    tokens_per_step: Histogram = field(default_factory=lambda: Histogram(COUNT_BOUNDS))
    step_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS_BOUNDS))
    abort_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS_BOUNDS))

    def observe_admission(self, sequence: Sequence) -> None:
        """Counts a prompt's hit rate once, at its first admission."""
        if sequence.first_scheduled is None:
            self.num_query_tokens += sequence.num_tokens
            self.num_hit_tokens += sequence.num_computed

    def observe_output(self, output: SequenceOutput) -> None:
        self.num_decode_tokens += len(output.token_ids)
        self.num_draft_tokens += output.num_draft_tokens
        self.num_accepted_tokens += output.num_accepted_tokens

    def observe_step(self, batch: Batch, seconds: float) -> None:
        self.num_steps += 1
        self.num_prefill_tokens += sum(
            max(0, min(item.start + item.num_tokens, item.sequence.num_prompt) - item.start)
            for item in batch.scheduled
        )
        self.sequences_per_step.observe(len(batch.scheduled))
        self.tokens_per_step.observe(batch.num_tokens)
        self.step_seconds.observe(seconds)
