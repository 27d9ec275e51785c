"""Runs every kind of step once, so that no request pays for a compilation, and measures what steps cost."""

import time
from collections.abc import Callable
from dataclasses import replace

from engine.batch import Batch, ScheduledSequence, build_batch
from engine.kv_pool import BLOCK_SIZE
from engine.runner import ModelRunner
from engine.scheduler import SchedulerLimits
from engine.selection import MAX_LOGIT_ROWS
from engine.sequence import Request, SamplingParams, Sequence
from engine.speculation.drafter import DraftSource, DraftTree
from engine.speculation.step_cost import StepCost, StepCosts

# Rows of the steps that are timed; beyond, drafts are seldom worth their rows.
TIMED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
NUM_TIMINGS = 5
GREEDY = SamplingParams(temperature=0.0)


def warm_up(
    runner: ModelRunner, limits: SchedulerLimits, vocab_size: int, plain_differs: bool = False
) -> StepCosts:
    """Writes to the pool's first blocks; nothing is in it yet.

    plain_differs: whether steps of one row a sequence are to be timed on their own.
    """
    # Both ways of drawing a token.
    for sampling in (GREEDY, SamplingParams(temperature=1.0, top_p=0.9, top_k=8)):
        runner.run(_prompt(1, vocab_size, sampling))
    _accept_a_branch(runner, vocab_size)
    runner.copy_blocks([], [])
    most = min(limits.max_num_batched_tokens, limits.num_blocks * BLOCK_SIZE, limits.max_model_len)
    # The largest steps too: what they allocate is there when it is needed.
    runner.run(_prompt(most, vocab_size, GREEDY))
    all_logits = replace(GREEDY, num_prompt_logprobs=0)
    runner.run(_prompt(min(most, MAX_LOGIT_ROWS), vocab_size, all_logits))
    drafted = _cost(runner, lambda rows: _draft(rows, vocab_size), most)
    if not plain_differs:
        return StepCosts(drafted, drafted)
    plain = _cost(runner, lambda rows: _decode(rows, vocab_size), min(limits.max_num_seqs, limits.num_blocks))
    return StepCosts(drafted, plain)


def _accept_a_branch(runner: ModelRunner, vocab_size: int) -> None:
    """The second of two is right, so that its K/V is moved."""
    plain = _decode(1, vocab_size)
    (sampled,) = runner.run(plain).sampled
    token = sampled[0].tokens[0] if sampled else 0
    draft = DraftTree([(token + 1) % vocab_size, token], [0, 0], DraftSource.PROMPT_LOOKUP)
    runner.run(build_batch((replace(plain.scheduled[0], draft=draft),)))


def _cost(runner: ModelRunner, batch_of: Callable[[int], Batch], most_rows: int) -> StepCost:
    """By the quickest of a few runs: what else the machine does is not the step's cost. The sizes take turns,
    so that a slow moment is not one size's alone."""
    batches = {rows: batch_of(rows) for rows in TIMED_ROWS if rows <= max(1, most_rows)}
    rounds = [{rows: _seconds(runner, batch) for rows, batch in batches.items()} for _ in range(NUM_TIMINGS)]
    return StepCost([(rows, min(timings[rows] for timings in rounds)) for rows in batches])


def _seconds(runner: ModelRunner, batch: Batch) -> float:
    started = time.perf_counter()
    runner.run(batch)
    return time.perf_counter() - started


def _prompt(num_rows: int, vocab_size: int, sampling: SamplingParams) -> Batch:
    tokens = [token % vocab_size for token in range(num_rows)]
    sequence = Sequence(Request("warm-up", tokens, sampling), 0, 0)
    sequence.block_table = list(range(-(-num_rows // BLOCK_SIZE)))
    return build_batch((ScheduledSequence(sequence, 0, num_rows),))


def _draft(num_rows: int, vocab_size: int) -> Batch:
    """One sequence's last token and a draft behind it."""
    sequence = Sequence(Request("warm-up", [0], GREEDY), 0, 0)
    sequence.block_table = list(range(-(-num_rows // BLOCK_SIZE)))
    tokens = [token % vocab_size for token in range(1, num_rows)]
    draft = DraftTree.chain(tokens, DraftSource.PROMPT_LOOKUP) if tokens else None
    return build_batch((ScheduledSequence(sequence, 0, 1, draft),))


def _decode(num_sequences: int, vocab_size: int) -> Batch:
    """One row for each of some sequences."""
    scheduled = []
    for index in range(num_sequences):
        sequence = Sequence(Request("warm-up", [index % vocab_size], GREEDY), 0, index)
        sequence.block_table = [index]
        scheduled.append(ScheduledSequence(sequence, 0, 1))
    return build_batch(tuple(scheduled))
