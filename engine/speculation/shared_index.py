"""Drafts from the memory manager's index of the namespace's past prompts and outputs."""

from engine.sequence import Sequence
from engine.speculation.drafter import DraftSource, DraftTree


class SharedIndex:
    """A `Drafter`: hands out what came with an update.

    Nobody waits for the answer, so the sequence has usually moved on when it comes. What is left of the
    draft still holds when the tokens since were just those it began with.
    """

    def propose(self, sequence: Sequence, max_depth: int) -> DraftTree | None:
        offered = sequence.offered_draft
        if offered is None:
            return None
        since = sequence.tokens[offered.base_length :]
        if offered.tokens[: len(since)] != since or len(since) >= len(offered.tokens):
            sequence.offered_draft = None
            return None
        # It was made as long as the match that it rests on, at most.
        match_length = len(offered.tokens) + len(since)
        draft = offered.tokens[len(since) :][:max_depth]
        return DraftTree.chain(draft, DraftSource.SHARED_INDEX, match_length)
