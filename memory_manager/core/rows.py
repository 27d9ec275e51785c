"""Sequence rows: found by sequence id through an open-addressing index, taken from a stack of spare ones.

The index has four slots a row, so its load never exceeds one quarter.
"""

# mypy: no-warn-return-any

import numpy as np

from memory_manager.core.handle import open_pool
from memory_manager.core.jit import inner, kernel
from memory_manager.core.layout import NONE, Array, Pool

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@inner
def _home(sequence_id: int, size: int) -> np.int64:
    """`size` is a power of two."""
    mixed = (np.uint64(sequence_id) * _MULTIPLIER) >> np.uint64(32)
    return np.int64(mixed & np.uint64(size - 1))


@inner
def find_row(pool: Pool, sequence_id: int) -> int:
    """The sequence's row, or NONE."""
    index = pool.row_index
    slot = _home(sequence_id, index.size)
    while index[slot].sequence_id != 0:
        if index[slot].sequence_id == sequence_id:
            return index[slot].row
        slot = (slot + 1) & (index.size - 1)
    return NONE


@inner
def _index_row(pool: Pool, sequence_id: int, row: int) -> None:
    index = pool.row_index
    slot = _home(sequence_id, index.size)
    while index[slot].sequence_id != 0:
        slot = (slot + 1) & (index.size - 1)
    index[slot].sequence_id = sequence_id
    index[slot].row = row


@inner
def take_row(pool: Pool, sequence_id: int, tenant: int, root: int) -> int:
    """A row for a new sequence of a namespace, without tokens and blocks."""
    counters = pool.counters
    row = pool.spare_rows[pool.spare_rows.size - 1 - counters[0].num_sequences]
    counters[0].num_sequences += 1
    _index_row(pool, sequence_id, row)
    sequence = pool.sequences[row]
    sequence.sequence_id = sequence_id
    sequence.path = pool.roots[root].path
    sequence.mark = 0
    sequence.num_tokens = sequence.num_written = sequence.num_sealed = sequence.num_blocks = 0
    sequence.num_inherited = 0
    sequence.node = pool.nodes.size + root
    sequence.first = sequence.last = sequence.cursor = NONE
    sequence.tenant = tenant
    sequence.root = root
    sequence.seals = True
    pool.roots[root].sequences += 1
    pool.tenants[tenant].sequences += 1
    return row


@inner
def give_row(pool: Pool, row: int) -> None:
    """Forgets a sequence that holds nothing any more."""
    counters = pool.counters
    sequence = pool.sequences[row]
    _unindex_row(pool, sequence.sequence_id)
    sequence.sequence_id = 0
    pool.roots[sequence.root].sequences -= 1
    pool.tenants[sequence.tenant].sequences -= 1
    counters[0].num_sequences -= 1
    pool.spare_rows[pool.spare_rows.size - 1 - counters[0].num_sequences] = row


@inner
def _unindex_row(pool: Pool, sequence_id: int) -> None:
    """Deletes by backward shift."""
    index = pool.row_index
    last = index.size - 1
    hole = _home(sequence_id, index.size)
    while index[hole].sequence_id != sequence_id:
        hole = (hole + 1) & last
    slot = hole
    while True:
        slot = (slot + 1) & last
        if index[slot].sequence_id == 0:
            break
        distance = (slot - _home(index[slot].sequence_id, index.size)) & last
        if distance >= (slot - hole) & last:
            index[hole].sequence_id = index[slot].sequence_id
            index[hole].row = index[slot].row
            hole = slot
    index[hole].sequence_id = 0


@kernel
def index_rows(arrays: Array) -> None:
    """Fills an empty index with all sequences in use."""
    pool: Pool = open_pool(arrays)
    for row in range(pool.sequences.size):
        if pool.sequences[row].sequence_id != 0:
            _index_row(pool, pool.sequences[row].sequence_id, row)
