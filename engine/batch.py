"""One step's work as a flat ragged batch."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.kernels.tree import Tree, causal
from engine.kv_pool import BLOCK_SIZE
from engine.sequence import Sequence
from engine.shared_runs import SharedRuns, find_shared_runs
from engine.speculation.drafter import DraftTree

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ScheduledSequence:
    """`num_tokens` tokens of a sequence from `start` on are computed, and a draft behind the last one."""

    sequence: Sequence
    start: int
    num_tokens: int
    draft: DraftTree | None = None

    @property
    def num_drafted(self) -> int:
        return 0 if self.draft is None else len(self.draft.tokens)

    @property
    def num_rows(self) -> int:
        return self.num_tokens + self.num_drafted

    @property
    def completes(self) -> bool:
        """Whether the step computes the last known token, so that a new one is sampled."""
        return self.start + self.num_tokens == self.sequence.num_tokens


@dataclass(frozen=True)
class Batch:
    """T rows of S sequences, row after row.

    token_ids [T], positions [T], slot_mapping [T] (physical slot of each new K/V), cu_query_lens [S + 1],
    context_lens [S] (the step's rows included), block_tables [S, max_blocks] padded with 0,
    logit_rows: the rows whose logits are wanted, ascending. All int32. The nodes of a draft lie in the slots
    behind the sequence's tokens; where one branches, rows of one position are not in one slot, and `tree`
    says who sees whom.
    """

    scheduled: tuple[ScheduledSequence, ...]
    token_ids: Int32
    positions: Int32
    slot_mapping: Int32
    cu_query_lens: Int32
    context_lens: Int32
    block_tables: Int32
    logit_rows: Int32
    shared_runs: SharedRuns
    tree: Tree | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def build_batch(scheduled: tuple[ScheduledSequence, ...]) -> Batch:
    counts = np.array([s.num_rows for s in scheduled], np.int32)
    cu_query_lens = np.zeros(len(scheduled) + 1, np.int32)
    np.cumsum(counts, out=cu_query_lens[1:])
    num_rows = int(cu_query_lens[-1])
    token_ids, positions = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32)
    slot_mapping = np.empty(num_rows, np.int32)
    context_lens = np.array([s.start + s.num_rows for s in scheduled], np.int32)
    widest = int(-(-context_lens.max() // BLOCK_SIZE))
    block_tables = np.zeros((len(scheduled), widest), np.int32)
    for row, item in enumerate(scheduled):
        first, last, end = cu_query_lens[row], cu_query_lens[row + 1], item.start + item.num_rows
        known = item.sequence.tokens[item.start : item.start + item.num_tokens]
        at = np.arange(item.start, end, dtype=np.int32)
        token_ids[first : first + item.num_tokens], positions[first:last] = known, at
        if item.draft is not None:
            token_ids[last - item.num_drafted : last] = item.draft.tokens
            positions[last - item.num_drafted : last] = [
                item.sequence.num_tokens - 1 + depth for depth in item.draft.depths
            ]
        num_blocks = -(-end // BLOCK_SIZE)
        block_tables[row, :num_blocks] = item.sequence.block_table[:num_blocks]
        slot_mapping[first:last] = block_tables[row, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
    return Batch(
        scheduled, token_ids, positions, slot_mapping, cu_query_lens, context_lens, block_tables,
        _logit_rows(scheduled, cu_query_lens),
        find_shared_runs(block_tables, np.array([s.start for s in scheduled], np.int32), counts),
        _tree(scheduled, cu_query_lens, context_lens),
    )  # fmt: skip


def _logit_rows(scheduled: tuple[ScheduledSequence, ...], cu_query_lens: Int32) -> Int32:
    rows: list[int] = []
    for i, item in enumerate(scheduled):
        if item.sequence.wants_prompt_logprobs:
            rows.extend(range(cu_query_lens[i], cu_query_lens[i + 1]))
        elif item.completes:
            last = int(cu_query_lens[i + 1])
            rows.extend(range(last - 1 - item.num_drafted, last))
    return np.array(rows, np.int32)


def _tree(scheduled: tuple[ScheduledSequence, ...], cu_query_lens: Int32, context_lens: Int32) -> Tree | None:
    """None where every draft is a chain, whose rows see what lies before them."""
    if all(item.draft is None or item.draft.is_chain for item in scheduled):
        return None
    tree = causal(cu_query_lens, context_lens)
    for i, item in enumerate(scheduled):
        if item.draft is not None:
            rows = slice(cu_query_lens[i + 1] - item.num_drafted, cu_query_lens[i + 1])
            tree.visible[rows] = item.sequence.num_tokens
            tree.ancestors[rows] = item.draft.ancestors
    return tree
