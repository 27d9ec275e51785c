"""Drafts from a smaller model with the same vocabulary, which keeps its K/V in pages of its own."""

import torch

from engine.batch import ScheduledSequence, build_batch
from engine.kv_pool import BLOCK_SIZE, KVPool
from engine.runner import Model
from engine.sequence import Request, SamplingParams, Sequence
from engine.speculation.drafter import DraftSource, DraftTree

# What a model that lags behind computes in a step, for all sequences: a long prompt must not hold up others.
CATCH_UP_TOKENS = 256


class DraftModel:
    """A `Drafter`: the likeliest tokens one after the other.

    A sequence holds pages here from its first draft until it gives up its blocks; one that finds none left
    goes without drafts.
    """

    def __init__(
        self, model: Model, kv: KVPool, vocab_size: int, max_position: int, seconds_per_token: float = 0.0
    ) -> None:
        """`vocab_size`: tokens that both models know."""
        self._model = model
        self._kv = kv
        self._vocab_size = vocab_size
        self._max_position = max_position
        self.seconds_per_token = seconds_per_token
        self._free = list(range(kv.num_blocks))
        self._catch_up_left = CATCH_UP_TOKENS

    def start_step(self) -> None:
        self._catch_up_left = CATCH_UP_TOKENS

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @torch.inference_mode()
    def propose(self, sequence: Sequence, max_depth: int) -> DraftTree | None:
        num_known = sequence.num_tokens
        depth = min(max_depth, self._max_position - num_known)
        if not isinstance(sequence.shadow, Shadow):
            sequence.shadow = Shadow(self._free, self._vocab_size)
        shadow = sequence.shadow
        if depth < 1 or not shadow.has_room(num_known + depth):
            return None
        shadow.follow(sequence.tokens)
        num_missed = shadow.num_uncomputed - 1
        count = min(num_missed, self._catch_up_left)
        self._catch_up_left -= count
        if count < num_missed:
            if count:
                self._compute(shadow, count)
            return None
        for _ in range(depth):
            logits = self._compute(shadow, shadow.num_uncomputed)
            shadow.tokens.append(int(logits[0, : self._vocab_size].argmax()))
        return DraftTree.chain(shadow.tokens[num_known:], DraftSource.DRAFT_MODEL)

    def _compute(self, shadow: "Shadow", num_tokens: int) -> torch.Tensor:
        batch = build_batch((ScheduledSequence(shadow, shadow.num_computed, num_tokens),))
        shadow.num_computed += num_tokens
        return self._model.logits(batch, self._kv)


class Shadow(Sequence):
    """A sequence as the draft model knows it: tokens it drafted itself may follow."""

    def __init__(self, free: list[int], vocab_size: int) -> None:
        super().__init__(Request("", [], SamplingParams(temperature=0.0)), 0, 0)
        self._free = free
        self._vocab_size = vocab_size
        self._num_agreed = 0

    def has_room(self, num_tokens: int) -> bool:
        """Takes the blocks that so many tokens need, if there are as many; whether the tokens fit."""
        num_missing = -(-num_tokens // BLOCK_SIZE) - len(self.block_table)
        if 0 < num_missing <= len(self._free):
            self.block_table += [self._free.pop() for _ in range(num_missing)]
        return self.capacity >= num_tokens

    def follow(self, tokens: list[int]) -> None:
        """Takes over what is known now; of what was computed for drafts the accepted part is kept."""
        agreed = self._num_agreed
        while agreed < min(len(tokens), self.num_tokens) and self.tokens[agreed] == tokens[agreed]:
            agreed += 1
        # The served model may have tokens that this one lacks; what it says behind them is no good, but said.
        self.tokens[agreed:] = [min(token, self._vocab_size - 1) for token in tokens[agreed:]]
        self._num_agreed = len(tokens)
        # The last token is computed in any case: drafts follow from it.
        self.num_computed = min(self.num_computed, agreed, len(tokens) - 1)

    def drop_blocks(self) -> None:
        self._free.extend(self.block_table)
        super().drop_blocks()
