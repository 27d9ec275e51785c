"""How many tokens to draft for whom."""

from collections.abc import Sequence as Rows

from engine.sequence import PRIOR_ACCEPTANCE, Sequence
from engine.speculation.drafter import Draft, Drafter
from engine.speculation.step_cost import StepCost

MAX_DRAFT_TOKENS = 16

# While nothing is drafted a sequence's acceptance slowly returns to hope, so that text that becomes
# predictable is noticed.
LEARNING_RATE = 0.15
FORGETTING_RATE = 0.004


class SpeculationPlanner:
    """Proposes drafts that are worth their rows.

    A step with R rows takes T(R). One more draft row of a sequence with acceptance a yields a token with
    probability a^i, i its place in the draft. It pays while that is more than the tokens per second of the
    step without it times the time it adds: the rule that maximises tokens per second greedily. Where a step
    without any draft is cheaper than T says, all drafts together must be worth that too.
    """

    def __init__(self, drafters: Rows[Drafter], cost: StepCost, plain_cost: StepCost | None = None) -> None:
        """`plain_cost`: of steps of one row a sequence, where that differs."""
        self._drafters = drafters
        self._cost = cost
        self._plain_cost = plain_cost or cost

    def plan(self, decodes: Rows[Sequence], num_other_rows: int, budget: int) -> dict[int, Draft]:
        """Drafts by index into `decodes`; `budget` bounds their total number of tokens."""
        rows = len(decodes) + num_other_rows
        expected = float(len(decodes))
        drafts: dict[int, Draft] = {}
        for i, sequence in enumerate(decodes):
            draft = self._propose(sequence, min(MAX_DRAFT_TOKENS, budget))
            count = 0 if draft is None else self._worthwhile(sequence, len(draft.tokens), rows, expected)
            # Room for twice as much next time: a draft is cut where its blocks end.
            sequence.draft_room = min(MAX_DRAFT_TOKENS, 2 * count)
            count = min(count, sequence.num_draftable)
            if draft is None or count < 1:
                continue
            drafts[i] = Draft(draft.tokens[:count], draft.source)
            budget -= count
            rows += count
            expected += sum(sequence.acceptance**j for j in range(1, count + 1))
        if drafts and not num_other_rows and not self._beats_plain(expected, rows, len(decodes)):
            drafts = {}
        for i, sequence in enumerate(decodes):
            if i not in drafts:
                sequence.acceptance += FORGETTING_RATE * (PRIOR_ACCEPTANCE - sequence.acceptance)
        return drafts

    def _beats_plain(self, expected: float, rows: int, num_decodes: int) -> bool:
        plain_rate = num_decodes / self._plain_cost.seconds(num_decodes)
        return expected / self._cost.seconds(rows) > plain_rate

    def _worthwhile(self, sequence: Sequence, limit: int, rows: int, expected: float) -> int:
        """The draft length at which expected tokens per second are highest."""
        best, best_rate = 0, expected / self._cost.seconds(rows)
        gain = 0.0
        for count in range(1, limit + 1):
            gain += sequence.acceptance**count
            rate = (expected + gain) / self._cost.seconds(rows + count)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _propose(self, sequence: Sequence, max_tokens: int) -> Draft | None:
        if max_tokens < 1 or sequence.request.disable_speculation:
            return None
        for drafter in self._drafters:
            draft = drafter.propose(sequence, max_tokens)
            if draft is not None:
                return draft
        return None


def learn(sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
    """Updates the sequence's acceptance: each accepted token is a success, the first miss a failure."""
    for j in range(min(num_accepted + 1, num_drafted)):
        hit = 1.0 if j < num_accepted else 0.0
        sequence.acceptance += LEARNING_RATE * (hit - sequence.acceptance)
