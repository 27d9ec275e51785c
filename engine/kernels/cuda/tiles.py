"""What one block of an attention kernel answers.

A tile is a run of query rows that meet the same tokens of one page table. With `group` query heads to a KV
head, row r of a tile is head r % group of query r // group. The grid is (tiles, Hkv, splits): a long run of
tokens is divided among splits, whose partial results `merge_splits` puts together.
"""

from typing import Any

import numpy as np

PAGE = 16
# Fields of a tile, int32.
TABLE = 0  # row of the block tables
FIRST_QUERY = 1  # where in query_ids its queries begin
FIRST_ROW, END_ROW = 2, 3  # rows, counted from there
FIRST_PAGE, END_PAGE, SPLIT_PAGES = 4, 5, 6  # pages of the tile, and how many of them a split takes
IS_PARTIAL, FIRST_SPLIT = 7, 8  # whether results are partial, and to which split of them the first split goes
TILE_FIELDS = 9

# Exponents in base 2. Finite, as kernels are compiled without infinities.
LOWEST = np.float32(-1e30)  # the maximum of nothing
MASKED = np.float32(-2e30)  # a score that counts for nothing even then
TREE_TOKENS = 64


def sight(cuda: Any) -> Any:
    @cuda.jit(device=True, inline="always")
    def sees(token: Any, visible: Any, ancestors: Any) -> Any:
        """A query attends to all tokens before `visible`, then to the nodes of a tree whose bit is set."""
        node = token - visible
        return node < 0 or (node < TREE_TOKENS and (ancestors >> node) & 1 != 0)

    return sees
