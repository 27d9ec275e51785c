"""Divides a batch's attention into tiles: on the host, once a step, for all layers.

A run of query rows and tokens with few rows is one tile of the decode kernel; one with many becomes tiles of
the append kernel. Sequences that begin with the same blocks meet those together, as one more run over the
shared tokens, and then each its own tail; the two are merged like the splits of a long context.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.kernels.cuda import tiles as t
from engine.kernels.tree import Tree, causal

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


SPLIT_TOKENS = 8


class Tuning(NamedTuple):
    """How work is divided; the defaults are for GPUs, tests use less."""

    page_warps: int = 4  # warps of a decode block, which divide the pages
    row_warps: int = 4  # warps of an append block, which divide the rows
    min_split_tokens: int = 256
    max_splits: int = 64
    num_blocks: int = 264  # attention blocks that keep the GPU busy
    max_threads: int = 1024  # of a block of the other kernels


class Heads(NamedTuple):
    num_kv_heads: int
    group: int  # query heads to a KV head
    decode_rows: int  # of a tile of the decode kernel
    append_rows: int


class SharedPrefix(NamedTuple):
    """Sequences of the batch whose first num_tokens tokens, whole blocks, lie in the same blocks."""

    sequences: tuple[int, ...]
    num_tokens: int


class Splits(NamedTuple):
    """Into how many splits launches divide their runs: sequences' own ones, and shared prefixes.

    `shared` 0: no prefix will be.
    """

    own: int
    shared: int


class Phase(NamedTuple):
    """One launch of an attention kernel."""

    tiles: Int32  # [n, TILE_FIELDS]
    decodes: bool  # the decode or the append kernel
    num_splits: int


@dataclass(frozen=True)
class AttentionPlan:
    """query_ids: queries in the order in which tiles name them. merged_queries [P]: those whose results are
    put together of the first merged_splits [P] partial ones, as later ones met no token; partial_rows [T] is
    the reverse."""

    phases: tuple[Phase, ...]
    query_ids: Int32
    visible: Int32
    ancestors: Int64
    partial_rows: Int32
    merged_queries: Int32
    merged_splits: Int32


class _Runs(NamedTuple):
    """Rows that meet the same tokens, int32 [n] each. `prefix`: which one precedes a sequence's own run."""

    table: Int32
    first_query: Int32
    num_rows: Int32
    first_token: Int32
    end_token: Int32
    prefix: Int32  # -1: none
    is_shared: npt.NDArray[np.bool_]


def plan_attention(
    cu_query_lens: Int32,
    context_lens: Int32,
    heads: Heads,
    tuning: Tuning,
    tree: Tree | None = None,
    prefixes: Sequence[SharedPrefix] = (),
    elsewhere: Sequence[int] = (),
    fixed: Splits | None = None,
) -> AttentionPlan:
    """cu_query_lens [S + 1], context_lens [S] (the step's rows included).

    Sequences in `elsewhere` get no tiles. With `fixed` splits, launches and what is merged do not depend on
    contexts and prefixes: all rows are merged if some may be, and prefixes are the append kernel's.
    """
    if tree is None:
        tree = causal(cu_query_lens, context_lens)
    query_ids, runs = _runs(cu_query_lens, context_lens, heads.group, prefixes, elsewhere)
    decodes = (runs.num_rows <= heads.decode_rows) & ~(runs.is_shared & (fixed is not None))
    launches = []
    splits = np.zeros(len(decodes), np.int32)
    for shared, kind in ((False, True), (False, False), (True, True), (True, False)):
        members = np.flatnonzero((runs.is_shared == shared) & (decodes == kind) & (runs.num_rows > 0))
        if len(members):
            rows = heads.decode_rows if kind else heads.append_rows
            count = _num_splits(runs, members, rows, heads, tuning)
            if fixed is not None:
                count = fixed.shared if shared else fixed.own
            splits[members] = count
            launches.append((kind, members, rows, count))
    prefix_splits = np.append(splits[runs.is_shared], 0)[runs.prefix]
    is_partial = runs.is_shared | (splits > 1) | (prefix_splits > 0)
    if fixed is not None and fixed.shared:
        is_partial[:] = True
    phases = tuple(
        Phase(_tiles(runs, is_partial, prefix_splits, members, rows, count, tuning), kind, count)
        for kind, members, rows, count in launches
    )
    query_lens = np.diff(cu_query_lens)
    is_merged = np.repeat(is_partial[~runs.is_shared], query_lens)
    filled = -(-_num_pages(runs) // _split_pages(runs, np.maximum(splits, 1), tuning))
    merged_splits = np.repeat((prefix_splits + filled)[~runs.is_shared], query_lens)[is_merged]
    return AttentionPlan(
        phases=phases,
        query_ids=query_ids,
        visible=tree.visible,
        ancestors=tree.ancestors,
        partial_rows=(np.cumsum(is_merged) - 1).astype(np.int32),
        merged_queries=np.flatnonzero(is_merged).astype(np.int32),
        merged_splits=merged_splits.astype(np.int32),
    )


def _runs(
    cu_query_lens: Int32,
    context_lens: Int32,
    group: int,
    prefixes: Sequence[SharedPrefix],
    elsewhere: Sequence[int],
) -> tuple[Int32, _Runs]:
    """query_ids and the runs: each sequence's own, then the shared ones."""
    num_sequences, num_queries = len(context_lens), int(cu_query_lens[-1])
    shared_queries = [
        np.concatenate([np.arange(cu_query_lens[s], cu_query_lens[s + 1]) for s in prefix.sequences])
        for prefix in prefixes
    ]
    query_ids = np.concatenate([np.arange(num_queries), *shared_queries]).astype(np.int32)
    shared_lens = np.array([len(queries) for queries in shared_queries], np.int32)
    prefix_of = np.full(num_sequences, -1)
    for index, prefix in enumerate(prefixes):
        prefix_of[list(prefix.sequences)] = index
    prefix_lens = np.array([prefix.num_tokens for prefix in prefixes] + [0])
    own = np.arange(num_sequences)
    own_lens = np.diff(cu_query_lens)
    own_lens[list(elsewhere)] = 0

    def columns(of_sequences: npt.ArrayLike, of_prefixes: npt.ArrayLike) -> Int32:
        return np.concatenate([of_sequences, of_prefixes]).astype(np.int32)

    return query_ids, _Runs(
        table=columns(own, [prefix.sequences[0] for prefix in prefixes]),
        first_query=columns(cu_query_lens[:-1], num_queries + np.cumsum(shared_lens) - shared_lens),
        num_rows=columns(own_lens, shared_lens) * group,
        first_token=columns(prefix_lens[prefix_of], np.zeros(len(prefixes))),
        end_token=columns(context_lens, prefix_lens[:-1]),
        prefix=columns(prefix_of, np.full(len(prefixes), -1)),
        is_shared=np.arange(num_sequences + len(prefixes)) >= num_sequences,
    )


def _num_splits(runs: _Runs, members: Int64, rows: int, heads: Heads, tuning: Tuning) -> int:
    blocks = int((-(-runs.num_rows[members] // rows)).sum()) * heads.num_kv_heads
    return fill(blocks, int((runs.end_token - runs.first_token)[members].max()), tuning)


def fill(num_blocks: int, longest: int, tuning: Tuning) -> int:
    """Into how many splits a launch of that many blocks divides its runs, so that the GPU is busy to the end.

    longest: tokens of the longest run. The GPU takes `tuning.num_blocks` blocks at a time; each such wave
    takes as long as a run divided by the splits, and a split costs what SPLIT_TOKENS more tokens would.
    """
    useful = max(1, min(-(-longest // tuning.min_split_tokens), tuning.max_splits))
    splits = np.arange(1, useful + 1)
    waves = -(-num_blocks * splits // tuning.num_blocks)
    return int(splits[np.argmin(waves / splits + splits * SPLIT_TOKENS / max(longest, 1))])


def _num_pages(runs: _Runs) -> Int32:
    return -(-runs.end_token // t.PAGE) - runs.first_token // t.PAGE


def _split_pages(runs: _Runs, num_splits: Int32 | int, tuning: Tuning) -> Int32:
    """Pages of each run that one split takes; the last splits may be left with none."""
    pages: Int32 = np.maximum(-(-_num_pages(runs) // num_splits), tuning.min_split_tokens // t.PAGE)
    return pages


def _tiles(
    runs: _Runs,
    is_partial: npt.NDArray[np.bool_],
    first_split: Int64,
    members: Int64,
    rows: int,
    num_splits: int,
    tuning: Tuning,
) -> Int32:
    counts = -(-runs.num_rows[members] // rows)
    of = np.repeat(members, counts)
    tiles = np.empty((len(of), t.TILE_FIELDS), np.int32)
    tiles[:, t.TABLE] = runs.table[of]
    tiles[:, t.FIRST_QUERY] = runs.first_query[of]
    tiles[:, t.FIRST_ROW] = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * rows
    tiles[:, t.END_ROW] = np.minimum(tiles[:, t.FIRST_ROW] + rows, runs.num_rows[of])
    tiles[:, t.FIRST_PAGE] = runs.first_token[of] // t.PAGE
    tiles[:, t.END_PAGE] = -(-runs.end_token[of] // t.PAGE)
    tiles[:, t.SPLIT_PAGES] = _split_pages(runs, num_splits, tuning)[of]
    tiles[:, t.IS_PARTIAL] = is_partial[of]
    tiles[:, t.FIRST_SPLIT] = first_split[of]
    return tiles
