"""Runs every kind of step once, so that no request pays for a compilation."""

from engine.batch import ScheduledSequence, build_batch
from engine.kv_pool import BLOCK_SIZE
from engine.runner import ModelRunner
from engine.scheduler import SchedulerLimits
from engine.sequence import Request, SamplingParams, Sequence

# (sequences, tokens of each): single and batched decode, chunks for the few-row and the many-row products.
_SHAPES = ((1, 1), (8, 1), (1, 8), (1, 64), (2, 40))


def warm_up(runner: ModelRunner, limits: SchedulerLimits, vocab_size: int) -> None:
    """Writes to the pool's first blocks; nothing is in it yet."""
    for num_sequences, num_tokens in _SHAPES:
        blocks_each = -(-num_tokens // BLOCK_SIZE)
        if num_sequences * blocks_each > limits.num_blocks:
            continue
        scheduled = []
        for i in range(num_sequences):
            # Both ways of drawing a token.
            sampling = SamplingParams(temperature=float(i % 2), top_p=0.9, top_k=8)
            prompt = [token % vocab_size for token in range(num_tokens)]
            sequence = Sequence(Request("warm-up", prompt, sampling), 0, i)
            sequence.block_table = list(range(i * blocks_each, (i + 1) * blocks_each))
            scheduled.append(ScheduledSequence(sequence, 0, num_tokens))
        runner.run(build_batch(tuple(scheduled)))
