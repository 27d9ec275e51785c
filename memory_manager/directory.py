"""Names for the rows of a table: which row belongs to which tenant or namespace."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Directory(Generic[K]):
    def __init__(self, num_rows: int) -> None:
        self.rows: dict[K, int] = {}
        self._spare = list(range(num_rows - 1, -1, -1))
        self._num_rows = num_rows

    def add(self, name: K) -> int | None:
        """A row for a new name, or None when all are taken."""
        if not self._spare:
            return None
        row = self._spare.pop()
        self.rows[name] = row
        return row

    def sweep(self, is_idle: Callable[[int], bool]) -> bool:
        """Forgets names whose rows are idle; answers whether that freed at least half of the rows."""
        for name, row in list(self.rows.items()):
            if is_idle(row):
                del self.rows[name]
                self._spare.append(row)
        return 2 * len(self._spare) >= self._num_rows

    def extend(self, num_rows: int) -> None:
        self._spare.extend(range(num_rows - 1, self._num_rows - 1, -1))
        self._num_rows = num_rows
