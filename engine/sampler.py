"""From logits to tokens: penalties and biases, then sampling, with log probabilities where asked for."""

from collections.abc import Sequence as Rows
from typing import NamedTuple, Protocol

import numpy as np
import torch

from engine.grammar import Bool, GrammarMatcher, ahead, allowed_tokens
from engine.kernels.sampling import DrawParameters, Int32, sample_rows
from engine.logprobs import Logprobs, logprobs_of
from engine.sequence import SamplingParams, Sequence


class Sampled(NamedTuple):
    tokens: list[int]
    logprobs: Logprobs | None


class SampleRow(NamedTuple):
    """The token that follows a sequence's tokens and `drafted` is drawn from logits row `row`."""

    row: int
    sequence: Sequence
    drafted: list[int] = []  # noqa: RUF012, never changed

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens + self.drafted

    @property
    def num_output(self) -> int:
        return self.sequence.num_output + len(self.drafted)


class Draw(Protocol):
    def __call__(self, logits: torch.Tensor, parameters: DrawParameters) -> Int32:
        """Token ids [R] from logits [R, vocab]; as `engine.kernels.sampling.sample_rows`."""
        ...


def draw_on_cpu(logits: torch.Tensor, parameters: DrawParameters) -> Int32:
    """A `Draw`."""
    out = np.empty(len(logits), np.int32)
    sample_rows(logits.numpy(), *parameters, out)
    return out


def sample(logits: torch.Tensor, rows: Rows[SampleRow], draw: Draw = draw_on_cpu) -> list[Sampled]:
    """One token for each of `rows` from float32 logits [R, vocab]."""
    if not rows:
        return []
    chosen_rows = [r.row for r in rows]
    values = logits if chosen_rows == list(range(len(logits))) else logits[chosen_rows]
    if any(_is_adjusted(r) for r in rows):
        values = values.clone()
        for i, r in enumerate(rows):
            if _is_adjusted(r):
                _adjust(values[i], r)
    tokens = draw(values, _parameters(rows)).tolist()
    return [Sampled([token], _logprobs(logits, r, token)) for r, token in zip(rows, tokens, strict=True)]


def _parameters(rows: Rows[SampleRow]) -> DrawParameters:
    params = [r.sequence.request.sampling for r in rows]
    return DrawParameters(
        np.array([p.temperature for p in params], np.float32),
        np.array([p.top_k for p in params], np.int32),
        np.array([p.top_p for p in params], np.float32),
        np.array([p.min_p for p in params], np.float32),
        np.array([p.seed for p in params], np.uint64),
        np.array([r.sequence.index for r in rows], np.int64),
        np.array([r.sequence.num_tokens + len(r.drafted) for r in rows], np.int64),
    )


def _logprobs(logits: torch.Tensor, row: SampleRow, token: int) -> Logprobs | None:
    num_top = row.sequence.request.sampling.num_logprobs
    return None if num_top is None else logprobs_of(logits[row.row : row.row + 1], [token], num_top)


def _is_adjusted(row: SampleRow) -> bool:
    p = row.sequence.request.sampling
    return bool(
        p.logit_bias
        or p.repetition_penalty != 1.0
        or p.frequency_penalty != 0.0
        or p.presence_penalty != 0.0
        or row.num_output < p.min_tokens
        or p.bad_words
        or row.sequence.matcher is not None
    )


def _adjust(values: torch.Tensor, row: SampleRow) -> None:
    """Applies penalties and biases to one row of logits, and removes what must not follow, in place."""
    p = row.sequence.request.sampling
    if p.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.tokens)), device=values.device)
        scores = values[seen]
        values[seen] = torch.where(scores > 0, scores / p.repetition_penalty, scores * p.repetition_penalty)
    output = row.tokens[row.sequence.num_prompt :]
    if output and (p.frequency_penalty != 0.0 or p.presence_penalty != 0.0):
        ids, counts = np.unique(output, return_counts=True)
        penalties = p.frequency_penalty * counts + p.presence_penalty
        values[torch.from_numpy(ids).to(values.device)] -= torch.from_numpy(penalties).to(values)
    if p.logit_bias:
        biased = torch.tensor(list(p.logit_bias), device=values.device)
        values[biased] += torch.tensor(list(p.logit_bias.values()), device=values.device)
    banned = _banned(p, output)
    if row.sequence.matcher is not None:
        illegal = torch.from_numpy(_illegal(row, row.sequence.matcher, banned, len(values)))
        values.masked_fill_(illegal.to(values.device), -torch.inf)
    elif banned:
        values[torch.tensor(banned, device=values.device)] = -torch.inf


def _banned(p: SamplingParams, output: list[int]) -> list[int]:
    """Stop tokens while there are too few others, and what would complete a bad word."""
    last = output[-1] if output else None
    completing = [
        word[-1]
        for word in p.bad_words
        if len(word) == 1 or (word[-2] == last and tuple(output[1 - len(word) :]) == word[:-1])
    ]
    return completing + (list(p.stop_token_ids) if len(output) < p.min_tokens else [])


def _illegal(row: SampleRow, matcher: GrammarMatcher, banned: list[int], vocab_size: int) -> Bool:
    """What the grammar does not allow, and banned tokens unless it allows no others: bool [vocab_size]."""
    with ahead(matcher, row.drafted):
        illegal = ~allowed_tokens(matcher, vocab_size)
    with_banned = illegal.copy()
    with_banned[banned] = True
    return illegal if with_banned.all() else with_banned
