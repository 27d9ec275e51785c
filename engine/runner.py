"""Runs a batch: model, logits, sampling."""

import time
from collections.abc import Sequence as Rows
from typing import NamedTuple, Protocol

import torch

from engine.batch import Batch, ScheduledSequence
from engine.kv_pool import KVPool
from engine.logprobs import concatenate, logprobs_of
from engine.page_mover import CpuPageMover, Move, PageMover
from engine.sampler import Draw, Sampled, SampleRow, draw_on_cpu, sample
from engine.sequence import Sequence
from engine.speculation.verification import accepted_paths


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
    def __init__(
        self, model: Model, kv: KVPool, draw: Draw = draw_on_cpu, mover: PageMover | None = None
    ) -> None:
        """`draw` samples where the logits are, `mover` works on the pages; both on a CPU by default."""
        self._model = model
        self._kv = kv
        self._draw = draw
        self._mover = mover or CpuPageMover(kv)
        self.copy_blocks = self._mover.copy_blocks

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
            at += 1 + item.num_drafted
        drawn = sample(logits, rows, self._draw)
        sampled = [None if span is None else drawn[span] for span in spans]
        self._accept(batch.scheduled, sampled)
        return StepResult(sampled, time.perf_counter() - started)

    def _accept(self, scheduled: Rows[ScheduledSequence], sampled: list[list[Sampled] | None]) -> None:
        """Of what was sampled after a draft's nodes keeps the accepted tokens and the one behind them."""
        drafts = {i: item.draft for i, item in enumerate(scheduled) if item.draft is not None}
        after = {i: sampled[i] or [] for i in drafts}
        targets = [[one.tokens[0] for one in nodes] for nodes in after.values()]
        moves: list[list[Move]] = []
        for i, path in zip(drafts, accepted_paths(list(drafts.values()), targets), strict=True):
            sampled[i] = [_joined([after[i][node] for node in (0, *path)])]
            moves.append(_moves(scheduled[i].sequence, path))
        if any(moves):
            self._mover.compact([of_sequence for of_sequence in moves if of_sequence])

    def _collect_prompt_logprobs(self, logits: torch.Tensor, item: ScheduledSequence) -> None:
        """Row j of a chunk predicts prompt token start + j + 1; the last prompt token predicts the output."""
        sequence = item.sequence
        num_top = sequence.request.sampling.num_prompt_logprobs
        end = min(item.start + item.num_tokens + 1, sequence.num_prompt)
        following = sequence.tokens[item.start + 1 : end]
        if following and num_top is not None:
            sequence.prompt_logprobs.append(logprobs_of(logits[: len(following)], following, num_top))


def _sample_rows(item: ScheduledSequence, at: int) -> list[SampleRow]:
    """The first token of each choice of a prompt, or the tokens after a sequence and each of its drafts."""
    if item.sequence.siblings:
        return [SampleRow(at, sequence) for sequence in (item.sequence, *item.sequence.siblings)]
    paths = [[]] if item.draft is None else item.draft.paths
    return [SampleRow(at + node, item.sequence, path) for node, path in enumerate(paths)]


def _joined(kept: list[Sampled]) -> Sampled:
    logprobs = [one.logprobs for one in kept if one.logprobs is not None]
    return Sampled([one.tokens[0] for one in kept], concatenate(logprobs) if logprobs else None)


def _moves(sequence: Sequence, path: list[int]) -> list[Move]:
    """From the slots of accepted nodes to those of their positions."""
    last = sequence.num_tokens - 1
    slots = ((sequence.slot(last + node), sequence.slot(last + depth)) for depth, node in enumerate(path, 1))
    return [(src, dst) for src, dst in slots if src != dst]
