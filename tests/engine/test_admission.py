"""Who gives blocks up."""

from engine.admission import victims
from engine.ledger import Ledger
from engine.sequence import Request, SamplingParams, Sequence, Status
from memory_manager import MemoryConfig, MemoryManager
from tests.in_process_memory import InProcessMemory


def running(*tenants: str) -> list[Sequence]:
    """Each needs a block for its next token."""
    sequences = []
    for order, tenant in enumerate(tenants):
        sequence = Sequence(Request("r", [1] * 17, SamplingParams(), tenant=tenant), 0, order)
        sequence.block_table, sequence.num_computed, sequence.status = [order], 16, Status.RUNNING
        sequences.append(sequence)
    return sequences


def ledger(num_free: int, num_fenced: int = 0) -> Ledger:
    made = Ledger(InProcessMemory(MemoryManager(MemoryConfig())), lambda sources, targets: None)
    made.num_free, made.num_fenced = num_free, num_fenced
    return made


def test_a_short_pool_costs_the_least_urgent_and_nobody_else() -> None:
    sequences = running("a", "b", "a", "b")
    # One that goes gives a block and needs none.
    assert victims(sequences, ledger(2), denied=sequences) == sequences[3:]
    assert victims(sequences, ledger(0), denied=sequences) == [sequences[3], sequences[2]]
    assert victims(sequences[:1], ledger(0), denied=sequences[:1]) == []


def test_a_denied_tenant_makes_room_for_itself() -> None:
    sequences = running("a", "b", "a", "b")
    assert victims(sequences, ledger(9), denied=[]) == []
    assert victims(sequences, ledger(9), denied=sequences[:1]) == [sequences[2]]
    assert victims(sequences, ledger(9, num_fenced=1), denied=sequences[:1]) == []
    sequences[0].block_table.append(9)
    assert victims(sequences, ledger(9), denied=sequences[:1]) == []
