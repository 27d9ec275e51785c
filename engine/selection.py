"""What the next step computes: decodes with their drafts first, then prefill chunks, within a budget."""

from engine.batch import ScheduledSequence
from engine.sequence import Sequence
from engine.speculation.drafter import DraftTree
from engine.speculation.planner import SpeculationPlanner
from engine.step_budget import StepBudget

# Rows of a step that have logits, of prompts and of drafts: a vocabulary of float32 each.
MAX_LOGIT_ROWS = 512


def can_run(sequence: Sequence) -> bool:
    """Whether blocks for the sequence's next tokens have been granted."""
    return sequence.capacity > sequence.num_computed and (
        sequence.num_uncomputed > 1 or sequence.capacity >= sequence.num_tokens
    )


def select(
    running: list[Sequence], budget: StepBudget, planner: SpeculationPlanner | None
) -> list[ScheduledSequence]:
    """`running` is sorted by urgency. Drafts take what decodes and prefill chunks leave of the budget."""
    decodes = [s for s in running if s.num_uncomputed == 1 and can_run(s)]
    left = budget.num_tokens(num_decodes=len(decodes))
    decodes = decodes[:left]
    left -= len(decodes)
    prefills: list[ScheduledSequence] = []
    logit_rows_left = MAX_LOGIT_ROWS
    for sequence in running:
        if left <= 0:
            break
        if sequence.num_uncomputed > 1 and can_run(sequence):
            count = min(sequence.num_uncomputed, sequence.capacity - sequence.num_computed, left)
            if sequence.wants_prompt_logprobs:
                count = min(count, logit_rows_left)
                logit_rows_left -= count
            if count == 0:
                continue
            prefills.append(ScheduledSequence(sequence, sequence.num_computed, count))
            left -= count
    num_prefill_rows = sum(item.num_tokens for item in prefills)
    drafts: dict[int, DraftTree] = {}
    if planner is not None:
        drafts = planner.plan(decodes, num_prefill_rows, min(left, logit_rows_left))
    return [ScheduledSequence(s, s.num_computed, 1, drafts.get(i)) for i, s in enumerate(decodes)] + prefills
