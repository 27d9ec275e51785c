"""Which waiting sequences ask for blocks, and which running ones give theirs up."""

from engine.kv_pool import BLOCK_SIZE
from engine.ledger import Ledger
from engine.selection import can_run
from engine.sequence import Sequence, Status
from engine.waiting import WaitingQueue


def candidates(
    waiting: WaitingQueue, running: list[Sequence], ledger: Ledger, max_running: int, short_of: int
) -> list[Sequence]:
    """Waiting sequences to ask blocks for, as many as may fit by what is known.

    short_of: blocks that the first of them needed and could not have.
    """
    # Each running sequence may soon need one more block.
    available = ledger.num_available - len(running)
    if running and short_of > available:
        return []
    chosen: list[Sequence] = []
    room = max_running - sum(map(_num_choices, running)) - ledger.num_forking
    for sequence in waiting.first(room):
        available -= -(-sequence.num_tokens // BLOCK_SIZE)
        room -= _num_choices(sequence)
        # What is cached costs nothing, so the first one is always asked for.
        if chosen and available < 0:
            break
        # More choices than may run at once run alone.
        if room < 0 and (chosen or running):
            break
        chosen.append(sequence)
    return chosen


def victims(running: list[Sequence], ledger: Ledger, denied: list[Sequence]) -> list[Sequence]:
    """Who has to wait again, so that others can write their next token: the least urgent.

    running: the most urgent first; denied: those that got no room in the last answer. Where the pool has
    blocks it was their tenants that might not have more: their own sequences make room for each other, and
    one that is alone learns, when it asks again, that it has all it may have.
    """
    stuck = [s for s in running if s.capacity < s.num_tokens]
    missing = len(stuck) - ledger.num_available
    if missing > 0:
        chosen: list[Sequence] = []
        for victim in reversed(running[1:]):
            if missing <= 0:
                break
            missing -= 1 + (victim in stuck)
            chosen.append(victim)
        return chosen
    if ledger.num_fenced > 0:
        return []
    tenants = {s.request.tenant for s in denied if s.status is Status.RUNNING and not can_run(s)}
    return [next(s for s in reversed(running) if s.request.tenant == tenant) for tenant in tenants]


def _num_choices(sequence: Sequence) -> int:
    """With those that are forked when its prompt is computed."""
    return 1 + len(sequence.siblings)
