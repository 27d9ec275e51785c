"""Runs a batch: model, logits, sampling."""

import time
from typing import NamedTuple, Protocol

import torch

from engine.batch import Batch, ScheduledSequence
from engine.kv_pool import KVPool
from engine.logprobs import concatenate, logprobs_of
from engine.sampler import Draw, Sampled, SampleRow, draw_on_cpu, sample


class Model(Protocol):
    def logits(self, batch: Batch, kv: KVPool) -> torch.Tensor:
        """Computes every row, writes its K/V into the pool; float32 logits of batch.logit_rows [R, vocab].

        They are valid until the next call.
        """
        ...


class StepResult(NamedTuple):
    """Per scheduled sequence: what was sampled for it and each of its unforked siblings, or None where
    the step did not reach its last token. Behind a draft that is its accepted tokens and one more."""

    sampled: list[list[Sampled] | None]
    seconds: float


class ModelRunner:
    def __init__(self, model: Model, kv: KVPool, draw: Draw = draw_on_cpu) -> None:
        """`draw` samples where the model's logits are."""
        self._model = model
        self._kv = kv
        self._draw = draw
        self.copy_blocks = kv.copy_blocks

    @torch.inference_mode()
    def run(self, batch: Batch) -> StepResult:
        started = time.perf_counter()
        logits = self._model.logits(batch, self._kv)
        rows: list[SampleRow] = []
        spans: list[slice | None] = []
        at = 0
        for item in batch.scheduled:
            if item.sequence.wants_prompt_logprobs:
                self._collect_prompt_logprobs(logits[at : at + item.num_tokens], item)
                at += item.num_tokens - (1 if item.completes else 0)
            if not item.completes:
                spans.append(None)
                continue
            first = len(rows)
            rows.extend(_sample_rows(item, at))
            spans.append(slice(first, len(rows)))
            at += 1 + len(item.draft_tokens)
        drawn = sample(logits, rows, self._draw)
        sampled = [
            None if span is None else _accept(drawn[span], item)
            for item, span in zip(batch.scheduled, spans, strict=True)
        ]
        return StepResult(sampled, time.perf_counter() - started)

    def _collect_prompt_logprobs(self, logits: torch.Tensor, item: ScheduledSequence) -> None:
        """Row j of a chunk predicts prompt token start + j + 1; the last prompt token predicts the output."""
        sequence = item.sequence
        num_top = sequence.request.sampling.num_prompt_logprobs
        following = sequence.tokens[item.start + 1 : item.start + item.num_tokens + 1]
        if following and num_top is not None:
            sequence.prompt_logprobs.append(logprobs_of(logits[: len(following)], following, num_top))


def _sample_rows(item: ScheduledSequence, at: int) -> list[SampleRow]:
    """The first token of each choice of a prompt, or the tokens after a sequence and each of its drafts."""
    if item.sequence.siblings:
        return [SampleRow(at, sequence) for sequence in (item.sequence, *item.sequence.siblings)]
    drafted = item.draft_tokens
    return [SampleRow(at + j, item.sequence, drafted[:j]) for j in range(len(drafted) + 1)]


def _accept(drawn: list[Sampled], item: ScheduledSequence) -> list[Sampled]:
    """Sample and match: the target's own tokens while they equal the draft, and the first that differs."""
    if item.draft is None:
        return drawn
    kept = drawn[:1]
    for drafted, following in zip(item.draft.tokens, drawn[1:], strict=True):
        if kept[-1].tokens[0] != drafted:
            break
        kept.append(following)
    logprobs = [one.logprobs for one in kept if one.logprobs is not None]
    return [Sampled([one.tokens[0] for one in kept], concatenate(logprobs) if logprobs else None)]
