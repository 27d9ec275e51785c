"""What a step costs by its number of rows, measured at start-up."""

import bisect
from collections.abc import Sequence
from typing import NamedTuple


class StepCost:
    """Piecewise linear through measured (rows, seconds)."""

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        self._rows = [rows for rows, _ in measured]
        # More rows never cost less; noise must not make it look so.
        self._seconds = [max(s for _, s in measured[: i + 1]) for i in range(len(measured))]

    def seconds(self, rows: int) -> float:
        if len(self._rows) == 1:
            return self._seconds[0]
        right = min(max(bisect.bisect_left(self._rows, rows), 1), len(self._rows) - 1)
        (r0, r1), (s0, s1) = self._rows[right - 1 : right + 1], self._seconds[right - 1 : right + 1]
        return s0 + (s1 - s0) * (rows - r0) / (r1 - r0)


class StepCosts(NamedTuple):
    drafted: StepCost
    plain: StepCost  # of steps of one row a sequence
