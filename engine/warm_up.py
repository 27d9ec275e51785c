"""Runs every kind of step once, so that no request pays for a compilation, and measures what steps cost."""

import time

from engine.batch import Batch, ScheduledSequence, build_batch
from engine.kv_pool import BLOCK_SIZE
from engine.runner import ModelRunner
from engine.sequence import Request, SamplingParams, Sequence
from engine.speculation.step_cost import StepCost

# Rows of the steps that are timed; beyond, drafts are seldom worth their rows.
TIMED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
NUM_TIMINGS = 3


def warm_up(runner: ModelRunner, num_blocks: int, vocab_size: int) -> StepCost:
    """Writes to the pool's first blocks; nothing is in it yet."""
    # Both ways of drawing a token.
    for temperature in (0.0, 1.0):
        runner.run(_batch(1, num_blocks, vocab_size, temperature))
    most = num_blocks * BLOCK_SIZE
    return StepCost(
        [(rows, _seconds(runner, rows, num_blocks, vocab_size)) for rows in TIMED_ROWS if rows <= most]
    )


def _seconds(runner: ModelRunner, num_rows: int, num_blocks: int, vocab_size: int) -> float:
    """The quickest of a few runs: what else the machine does is not the step's cost."""
    batch = _batch(num_rows, num_blocks, vocab_size)
    timings = []
    for _ in range(NUM_TIMINGS):
        started = time.perf_counter()
        runner.run(batch)
        timings.append(time.perf_counter() - started)
    return min(timings)


def _batch(num_rows: int, num_blocks: int, vocab_size: int, temperature: float = 0.0) -> Batch:
    """One sequence's rows, all of which have logits, like a draft that is verified."""
    sampling = SamplingParams(temperature=temperature, top_p=0.9, top_k=8, num_prompt_logprobs=0)
    tokens = [token % vocab_size for token in range(num_rows)]
    sequence = Sequence(Request("warm-up", tokens, sampling), 0, 0)
    sequence.block_table = list(range(min(num_blocks, -(-num_rows // BLOCK_SIZE))))
    return build_batch((ScheduledSequence(sequence, 0, num_rows),))
