"""Tables whose size follows use: doubled by copying, between two calls."""

import numpy as np

from memory_manager.core.handle import address_table
from memory_manager.core.layout import ROW, Array, Pool, aligned_zeros
from memory_manager.core.rows import index_rows


def doubled(table: Array) -> Array:
    grown = aligned_zeros(2 * table.size, table.dtype)
    grown[: table.size] = table
    return grown


def grow_sequences(pool: Pool) -> Pool:
    """Twice as many sequence rows."""
    size = pool.sequences.size
    num_spare = size - int(pool.counters["num_sequences"][0])
    spare_rows = aligned_zeros(2 * size, np.int32)
    spare_rows[:size] = np.arange(2 * size - 1, size - 1, -1)
    spare_rows[size : size + num_spare] = pool.spare_rows[:num_spare]
    grown = pool._replace(
        sequences=doubled(pool.sequences),
        spare_rows=spare_rows,
        row_index=aligned_zeros(2 * pool.row_index.size, ROW),
    )
    index_rows(address_table(grown))
    return grown
