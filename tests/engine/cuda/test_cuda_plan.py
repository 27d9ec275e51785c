"""How a batch's attention is divided: every row meets every token that it may see exactly once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.cuda import tiles as t
from engine.kernels.cuda.plan import (
    AttentionPlan,
    Heads,
    SharedPrefix,
    Splits,
    Tuning,
    fill,
    plan_attention,
)

HEADS = Heads(num_kv_heads=2, group=3, decode_rows=16, append_rows=64)


def meetings(
    plan: AttentionPlan, num_queries: int, width: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """How often each row [num_queries, group] meets each page [width]; checks where results go."""
    met = np.zeros((num_queries, HEADS.group, width), np.int64)
    written = np.zeros((num_queries, HEADS.group, 200), np.int64)
    filled = np.zeros_like(written)
    for phase in plan.phases:
        assert phase.tiles.dtype == np.int32
        for tile in phase.tiles:
            assert tile[t.END_ROW] - tile[t.FIRST_ROW] <= (
                HEADS.decode_rows if phase.decodes else HEADS.append_rows
            )
            for row in range(tile[t.FIRST_ROW], tile[t.END_ROW]):
                query = plan.query_ids[tile[t.FIRST_QUERY] + row // HEADS.group]
                for split in range(phase.num_splits):
                    start = tile[t.FIRST_PAGE] + split * tile[t.SPLIT_PAGES]
                    end = min(start + tile[t.SPLIT_PAGES], tile[t.END_PAGE])
                    met[query, row % HEADS.group, start : max(start, end)] += 1
                    if tile[t.IS_PARTIAL]:
                        at = query, row % HEADS.group, tile[t.FIRST_SPLIT] + split
                        written[at] += 1
                        filled[at] += end > start
    for query in range(num_queries):
        if query in plan.merged_queries:
            at = plan.partial_rows[query]
            assert plan.merged_queries[at] == query
            assert (written[query, :, : plan.merged_splits[at]] == 1).all()
            assert (filled[query, :, plan.merged_splits[at] - 1] == 1).all()
            assert (filled[query, :, plan.merged_splits[at] :] == 0).all()
        else:
            assert (written[query] == 0).all()
    return met


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], list[SharedPrefix]]:
    """Query lengths, context lengths and prefixes of a batch."""
    query_lens = draw(st.lists(st.sampled_from([1, 1, 1, 2, 6, 30]), min_size=1, max_size=12))
    pages = draw(st.integers(0, 4))
    context_lens = [n + pages * 16 + draw(st.integers(0, 600)) for n in query_lens]
    order = draw(st.permutations(range(len(query_lens))))
    cut = draw(st.integers(0, len(order)))
    groups = [tuple(group) for group in (order[:cut], order[cut:]) if len(group) > 1]
    return query_lens, context_lens, [SharedPrefix(group, pages * 16) for group in groups] if pages else []


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 40), st.none() | st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_every_row_meets_every_page_once(
    batch: tuple[list[int], list[int], list[SharedPrefix]], num_blocks: int, fixed: tuple[int, int] | None
) -> None:
    query_lens, context_lens, prefixes = batch
    plan = plan_attention(
        np.cumsum([0, *query_lens]).astype(np.int32),
        np.array(context_lens, np.int32),
        HEADS,
        Tuning(min_split_tokens=32, num_blocks=num_blocks),
        prefixes=prefixes,
        fixed=Splits(*fixed) if fixed is not None else None,
    )
    width = 60
    met = meetings(plan, sum(query_lens), width)
    pages = np.repeat([-(-length // 16) for length in context_lens], query_lens)
    assert (met == (np.arange(width) < pages[:, None])[:, None]).all()
    ends = np.cumsum(query_lens)
    for s, length in enumerate(context_lens):
        assert plan.visible[ends[s] - 1] == length
        assert plan.visible[ends[s] - query_lens[s]] == length - query_lens[s] + 1


def test_sequences_attended_elsewhere_have_no_tiles() -> None:
    cu_query_lens, context_lens = np.array([0, 40, 41, 42], np.int32), np.array([40, 9, 9], np.int32)
    plan = plan_attention(cu_query_lens, context_lens, HEADS, Tuning(), elsewhere=[0])
    assert (meetings(plan, 42, 3).sum((1, 2)) > 0).tolist() == [False] * 40 + [True] * 2
    assert plan_attention(cu_query_lens, context_lens, HEADS, Tuning(), elsewhere=[0, 1, 2]).phases == ()


@pytest.mark.parametrize(
    ("num_blocks", "longest", "expected"),
    [
        (8, 2048, 8),  # short of blocks: as many splits as have enough tokens
        (8, 65536, 33),  # one full wave
        (256, 2048, 1),  # nearly full as it is
        (320, 2048, 4),  # five quarters of a wave instead of two
        (1, 1, 1),
    ],
)
def test_splits_fill_the_gpu_to_the_end(num_blocks: int, longest: int, expected: int) -> None:
    assert fill(num_blocks, longest, Tuning()) == expected
