"""Tables whose size follows use: doubled by copying, between two calls."""

import numpy as np

from memory_manager.core.layout import ROW, Array, Pool
from memory_manager.core.rows import index_row


def doubled(table: Array) -> Array:
    return np.concatenate([table, np.zeros_like(table)])


def grow_sequences(pool: Pool) -> Pool:
    """Twice as many sequence rows."""
    size = pool.sequences.size
    num_spare = size - int(pool.counters["num_sequences"][0])
    spare_rows = np.zeros(2 * size, np.int32)
    spare_rows[:size] = np.arange(2 * size - 1, size - 1, -1)
    spare_rows[size : size + num_spare] = pool.spare_rows[:num_spare]
    grown = pool._replace(
        sequences=doubled(pool.sequences),
        spare_rows=spare_rows,
        row_index=np.zeros(2 * pool.row_index.size, ROW),
    )
    for row in np.flatnonzero(pool.sequences["sequence_id"]):
        index_row(grown, int(pool.sequences["sequence_id"][row]), int(row))
    return grown
