"""Which sequences of a batch begin with the same blocks, so that attention reads those once for all."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.kv_pool import BLOCK_SIZE

Int32 = npt.NDArray[np.int32]

# A shorter common run is not worth a group of its own.
MIN_SHARED_BLOCKS = 4
# A sequence with more rows reads its keys for many of them at once.
MAX_MEMBER_ROWS = 32


class SharedRuns(NamedTuple):
    """group_of [S]: a sequence's group or -1; group_blocks [G, B] and group_lens [G], in tokens: its run."""

    group_of: Int32
    group_blocks: Int32
    group_lens: Int32


def find_shared_runs(block_tables: Int32, starts: Int32, num_rows: Int32) -> SharedRuns:
    """Groups sequences by their first blocks; a run is what all of a group's tables begin with.

    block_tables [S, B]; starts [S]: first new position of each, which the run must not reach; num_rows [S].
    """
    num_sequences = len(starts)
    group_of = np.full(num_sequences, -1, np.int32)
    longest = np.where(num_rows <= MAX_MEMBER_ROWS, starts // BLOCK_SIZE, 0)
    by_beginning: dict[bytes, list[int]] = {}
    for s in np.flatnonzero(longest >= MIN_SHARED_BLOCKS):
        by_beginning.setdefault(block_tables[s, :MIN_SHARED_BLOCKS].tobytes(), []).append(int(s))
    runs: list[Int32] = []
    for members in by_beginning.values():
        if len(members) < 2:
            continue
        limit = int(longest[members].min())
        tables = block_tables[members, :limit]
        same = (tables == tables[0]).all(axis=0)
        group_of[members] = len(runs)
        runs.append(tables[0, : limit if same.all() else int(same.argmin())])
    group_blocks = np.zeros((len(runs), max(map(len, runs), default=1)), np.int32)
    for group, run in enumerate(runs):
        group_blocks[group, : len(run)] = run
    group_lens = np.array([len(run) * BLOCK_SIZE for run in runs], np.int32)
    return SharedRuns(group_of, group_blocks, group_lens)
