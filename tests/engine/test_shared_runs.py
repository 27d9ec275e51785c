"""Which blocks are read once for several sequences."""

import numpy as np

from engine.shared_runs import MAX_MEMBER_ROWS, find_shared_runs


def test_a_long_chunk_does_not_shorten_the_run_of_those_that_decode() -> None:
    tables = np.tile(np.arange(60, dtype=np.int32), (3, 1))
    tables[1, 57:] += 100
    tables[2, 4:] += 200
    starts, one = np.array([930, 925, 64], np.int32), np.array([1, 1, 1], np.int32)
    chunk = np.array([1, 1, MAX_MEMBER_ROWS + 1], np.int32)
    runs = find_shared_runs(tables, starts, chunk)
    assert runs.group_of.tolist() == [0, 0, -1]
    assert runs.group_lens.tolist() == [57 * 16]
    runs = find_shared_runs(tables, starts, one)
    assert runs.group_of.tolist() == [0, 0, 0]
    assert runs.group_lens.tolist() == [4 * 16]
