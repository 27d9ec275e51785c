"""Names for the rows of a table: which row belongs to which tenant or namespace."""

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Directory(Generic[K]):
    def __init__(self, num_rows: int) -> None:
        self.rows: dict[K, int] = {}
        self.names: dict[int, K] = {}  # by row
        self.spare = list(range(num_rows - 1, -1, -1))  # a stack

    def restore(self, rows: dict[K, int], spare: list[int]) -> None:
        self.rows, self.spare = rows, spare
        self.names = {row: name for name, row in rows.items()}

    def add(self, name: K) -> int | None:
        """A row for a new name, or None when all are taken."""
        if not self.spare:
            return None
        row = self.spare.pop()
        self.rows[name], self.names[row] = row, name
        return row

    def sweep(self, is_idle: Callable[[int], bool]) -> bool:
        """Forgets names whose rows are idle; answers whether that freed at least half of the rows."""
        for name, row in list(self.rows.items()):
            if is_idle(row):
                del self.rows[name], self.names[row]
                self.spare.append(row)
        return len(self.spare) >= len(self.rows)

    def extend(self, num_rows: int) -> None:
        """The table has `num_rows` rows now."""
        self.spare.extend(range(num_rows - 1, len(self.rows) + len(self.spare) - 1, -1))
