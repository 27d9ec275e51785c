"""The draft index against a plain search over all texts."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_manager.core.drafts import MAX_MATCH, MIN_MATCH, DraftRing, new_ring, propose, remember


def drafted(ring: DraftRing, namespace: int, suffix: list[int], max_tokens: int = 64) -> list[int]:
    out = np.zeros(64, np.int32)
    count = propose(ring, namespace, np.array(suffix, np.int32), max_tokens, out)
    return [int(token) for token in out[:count]]


def filled(*texts: list[int], namespace: int = 0, size: int = 1 << 12) -> DraftRing:
    ring = new_ring(size)
    for text in texts:
        remember(ring, namespace, np.array(text, np.int32))
    return ring


def test_what_followed_is_proposed_as_far_as_was_matched() -> None:
    ring = filled(list(range(100)))
    assert drafted(ring, 0, [10, 11, 12, 13]) == [14, 15, 16, 17]
    assert drafted(ring, 0, list(range(20, 60))) == list(range(60, 60 + MAX_MATCH))
    assert drafted(ring, 0, list(range(60)), max_tokens=3) == [60, 61, 62]


def test_nothing_is_proposed_without_a_match() -> None:
    ring = filled(list(range(100)))
    assert drafted(ring, 0, [3, 2, 1, 0]) == []
    assert drafted(ring, 0, [10, 11, 12]) == []
    assert drafted(ring, 0, [96, 97, 98, 99]) == []


def test_another_namespace_is_never_drafted_from() -> None:
    ring = filled(list(range(100)), namespace=1)
    assert drafted(ring, 2, [10, 11, 12, 13]) == []
    assert drafted(ring, 1, [10, 11, 12, 13]) == [14, 15, 16, 17]


def test_a_draft_does_not_run_into_the_next_text() -> None:
    ring = filled([1, 2, 3, 4, 5], [7, 8, 9])
    assert drafted(ring, 0, [1, 2, 3, 4]) == [5]


def test_the_longest_match_wins_then_the_most_frequent() -> None:
    common = [1, 2, 3, 4]
    ring = filled([9, *common, 5, 5], [*common, 6, 6], [*common, 6, 7], [8, *common, 7, 7])
    assert drafted(ring, 0, [9, *common]) == [5, 5]
    assert drafted(ring, 0, [0, *common])[:1] == [6]


def test_the_oldest_texts_are_forgotten_first() -> None:
    ring = new_ring(256)
    remember(ring, 0, np.arange(1000, 1100, dtype=np.int32))
    for start in range(0, 200, 100):
        remember(ring, 0, np.arange(start, start + 100, dtype=np.int32))
    assert drafted(ring, 0, [1010, 1011, 1012, 1013]) == []
    assert drafted(ring, 0, [150, 151, 152, 153]) == [154, 155, 156, 157]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 3), max_size=40)), max_size=12),
    st.lists(st.integers(0, 3), max_size=50),
    st.integers(0, 8),
)
def test_every_draft_did_follow_such_a_suffix_in_its_namespace(
    texts: list[tuple[int, list[int]]], suffix: list[int], max_tokens: int
) -> None:
    ring = new_ring(1 << 12)
    for namespace, text in texts:
        remember(ring, namespace, np.array(text, np.int32))
    draft = drafted(ring, 0, suffix, max_tokens)
    assert len(draft) <= max_tokens
    if draft:
        context = suffix[-max(MIN_MATCH, len(draft)) :]
        joined = [text for namespace, text in texts if namespace == 0]
        assert any(
            text[i : i + len(context) + len(draft)] == context + draft
            for text in joined
            for i in range(len(text))
        )
