"""How many tokens to draft for whom."""

from collections.abc import Sequence as Rows

from engine.grammar import is_legal
from engine.sequence import Sequence
from engine.speculation.acceptance import Acceptance
from engine.speculation.draft_model import DraftModel
from engine.speculation.drafter import Drafter, DraftTree
from engine.speculation.step_cost import StepCost

MAX_DRAFT_TOKENS = 31  # with the token before them as many rows as attention takes at once
BETWEEN_LEARNING_RATE = 0.05


class SpeculationPlanner:
    """Proposes drafts that are worth their rows.

    A step with R rows takes T(R). A drafted token has a chance to be right when the one it follows is; of
    several that follow the same one, each catches its share of what those before it missed. So every node of
    a draft has a probability to yield a token. The likeliest nodes are verified, as many as maximise expected
    tokens per second. Where a step without any draft is cheaper than T says, all drafts together must be
    worth that too. What passes between steps counts as well.
    """

    def __init__(
        self,
        drafters: Rows[Drafter],
        cost: StepCost,
        plain_cost: StepCost | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        """The first of `drafters` that has an idea is listened to; the draft model is asked when none has.

        plain_cost: of steps of one row a sequence, where that differs.
        """
        self.acceptance = Acceptance()
        self._drafters = drafters
        self._draft_model = draft_model
        self._cost = cost
        self._plain_cost = plain_cost or cost
        self._between_s = 0.0

    def plan(self, decodes: Rows[Sequence], num_other_rows: int, budget: int) -> dict[int, DraftTree]:
        """Drafts by index into `decodes`; `budget` bounds their total number of tokens."""
        if self._draft_model is not None:
            self._draft_model.start_step()
        rows = len(decodes) + num_other_rows
        expected = float(len(decodes))
        drafts: dict[int, DraftTree] = {}
        for i, sequence in enumerate(decodes):
            limit = min(MAX_DRAFT_TOKENS, budget)
            draft = self._propose(sequence, limit, rows, expected)
            likeliest = []
            if draft is not None:
                likeliest = _by_probability(draft, self.acceptance.chances(sequence, draft))[:limit]
            count = self._worthwhile([probability for _, probability in likeliest], rows, expected)
            chosen = likeliest[: min(count, sequence.capacity - sequence.num_tokens)]
            # A draft is cut where its blocks end. What is asked for comes when another one has been verified.
            sequence.draft_room = 2 * min(MAX_DRAFT_TOKENS, 2 * count)
            if draft is None or not chosen:
                continue
            drafts[i] = draft.restricted(sorted(node for node, _ in chosen))
            budget -= len(chosen)
            rows += len(chosen)
            expected += sum(probability for _, probability in chosen)
        if drafts and not num_other_rows and not self._beats_plain(expected, rows, len(decodes)):
            drafts = {}
        for i, sequence in enumerate(decodes):
            if i not in drafts:
                self.acceptance.forget(sequence)
        return drafts

    def note_between(self, seconds: float) -> None:
        """What passed between two steps."""
        self._between_s += BETWEEN_LEARNING_RATE * (seconds - self._between_s)

    def _seconds(self, rows: int) -> float:
        return self._cost.seconds(rows) + self._between_s

    def _beats_plain(self, expected: float, rows: int, num_decodes: int) -> bool:
        plain_rate = num_decodes / (self._plain_cost.seconds(num_decodes) + self._between_s)
        return expected / self._seconds(rows) > plain_rate

    def _worthwhile(
        self, probabilities: Rows[float], rows: int, expected: float, seconds_each: float = 0.0
    ) -> int:
        """How many of the nodes to verify so that expected tokens per second are highest.

        seconds_each: what a node costs besides its row.
        """
        best, best_rate = 0, expected / self._seconds(rows)
        gain = 0.0
        for count, probability in enumerate(probabilities, 1):
            gain += probability
            rate = (expected + gain) / (self._seconds(rows + count) + count * seconds_each)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _propose(self, sequence: Sequence, limit: int, rows: int, expected: float) -> DraftTree | None:
        max_depth = min(limit, sequence.draft_depth)
        if max_depth < 1:
            return None
        for drafter in self._drafters:
            draft = _legal(drafter.propose(sequence, max_depth), sequence)
            if draft is not None:
                return draft
        if self._draft_model is None:
            return None
        chances = [sequence.acceptance**depth for depth in range(1, max_depth + 1)]
        depth = self._worthwhile(chances, rows, expected, self._draft_model.seconds_per_token)
        return _legal(self._draft_model.propose(sequence, depth), sequence) if depth else None


def _legal(draft: DraftTree | None, sequence: Sequence) -> DraftTree | None:
    """A draft cut where the sequence's grammar does not allow it or ends; None when nothing is left."""
    matcher, ends = sequence.matcher, sequence.request.sampling.stop_token_ids
    if draft is None or matcher is None:
        return draft
    legal = [
        node
        for node, path in enumerate(draft.paths)
        if node and ends.isdisjoint(path[:-1]) and is_legal(matcher, path)
    ]
    return draft.restricted(legal) if legal else None


def _by_probability(draft: DraftTree, chances: Rows[float]) -> list[tuple[int, float]]:
    """Nodes with their probabilities, the likeliest first; a node never comes before its parent.

    chances: of each depth.
    """
    probabilities, missed = [1.0], [1.0]
    for parent, depth in zip(draft.parents, draft.depths, strict=True):
        chance = chances[depth - 1]
        probabilities.append(probabilities[parent] * missed[parent] * chance)
        missed[parent] *= 1 - chance
        missed.append(1.0)
    return sorted(enumerate(probabilities[1:], 1), key=lambda node: -node[1])
