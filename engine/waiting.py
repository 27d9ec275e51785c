"""Sequences that wait for blocks."""

import bisect
from collections.abc import Iterator

from engine.sequence import Sequence


class WaitingQueue:
    """Most urgent first; a preempted sequence is older than those that never ran, so it comes back first."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._parked: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences) + len(self._parked)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._sequences
        yield from self._parked.values()

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._sequences, sequence, key=lambda s: s.urgency)

    def discard(self, sequence: Sequence) -> None:
        self._parked.pop(sequence.sequence_id, None)
        if sequence in self._sequences:
            self._sequences.remove(sequence)

    def first(self, count: int) -> list[Sequence]:
        return self._sequences[:count]

    def park(self, sequence: Sequence) -> None:
        """Its prefix is being computed by another sequence; `wake` brings it back."""
        self._sequences.remove(sequence)
        self._parked[sequence.sequence_id] = sequence

    def wake(self, sequence_ids: set[int]) -> None:
        for sequence_id in sequence_ids & self._parked.keys():
            self.add(self._parked.pop(sequence_id))

    def wake_all(self) -> None:
        self.wake(set(self._parked))
