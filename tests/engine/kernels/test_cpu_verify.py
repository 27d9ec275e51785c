"""Acceptance of drafts against a loop in plain Python."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import cpu


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], list[int]]:
    width, num_rows = draw(st.integers(0, 8)), draw(st.integers(0, 9))
    token = st.integers(0, 2)
    row = st.lists(token, min_size=width, max_size=width)
    longer = st.lists(token, min_size=width + 1, max_size=width + 1)
    drafts = draw(st.lists(row, min_size=num_rows, max_size=num_rows))
    targets = draw(st.lists(longer, min_size=num_rows, max_size=num_rows))
    counts = draw(st.lists(st.integers(0, width), min_size=num_rows, max_size=num_rows))
    return drafts, targets, counts


@settings(deadline=None)  # the first call compiles
@given(batches())
def test_verify(batch: tuple[list[list[int]], list[list[int]], list[int]]) -> None:
    drafts, targets, counts = batch
    width = len(drafts[0]) if drafts else 0
    accepted, next_token = np.full((2, len(drafts)), -1, np.int32)
    cpu.verify_drafts(
        np.array(drafts, np.int32).reshape(len(drafts), width),
        np.array(targets, np.int32).reshape(len(drafts), width + 1), np.array(counts, np.int32), accepted,
        next_token,
    )  # fmt: skip
    for row, (draft, target, count) in enumerate(zip(drafts, targets, counts, strict=True)):
        matching = 0
        while matching < count and draft[matching] == target[matching]:
            matching += 1
        assert accepted[row] == matching
        assert next_token[row] == target[matching]
