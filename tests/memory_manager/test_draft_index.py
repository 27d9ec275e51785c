"""The draft index against a plain search over all texts, and as an engine meets it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from memory_manager import Acquire, Advance, MemoryConfig, MemoryManager, Release
from memory_manager.core.drafts import BOUNDARY, MAX_MATCH, MIN_MATCH, DraftRing, draft, new_ring, remember
from memory_manager.core.layout import Array
from memory_manager.draft_index import DraftIndex, TextNamespace
from tests.memory_manager.engine_side import Clock, EngineSide, Tokens, int32s, int64s


@njit  # type: ignore[untyped-decorator]
def _draft(ring: DraftRing, suffix: Array, max_tokens: int, out: Array) -> int:
    return draft(ring, suffix, max_tokens, out)


def drafted(ring: DraftRing, suffix: list[int], max_tokens: int = 64) -> list[int]:
    out = np.zeros(64, np.int32)
    count = _draft(ring, np.array(suffix, np.int32), max_tokens, out)
    return [int(token) for token in out[:count]]


def filled(*texts: list[int], size: int = 1 << 12) -> DraftRing:
    ring = new_ring(size)
    for text in texts:
        remember(ring, np.array([*text, BOUNDARY], np.int32))
    return ring


def test_what_followed_is_proposed_as_far_as_was_matched() -> None:
    ring = filled(list(range(4 * MAX_MATCH)))
    assert drafted(ring, [10, 11, 12, 13]) == [14, 15, 16, 17]
    end = 2 * MAX_MATCH
    assert drafted(ring, list(range(end - MAX_MATCH - 5, end))) == list(range(end, end + MAX_MATCH))
    assert drafted(ring, list(range(60)), max_tokens=3) == [60, 61, 62]


def test_nothing_is_proposed_without_a_match() -> None:
    ring = filled(list(range(100)))
    assert drafted(ring, [3, 2, 1, 0]) == []
    assert drafted(ring, [10, 11, 12]) == []
    assert drafted(ring, [96, 97, 98, 99]) == []


def test_a_draft_does_not_run_into_the_next_text() -> None:
    ring = filled([1, 2, 3, 4, 5], [7, 8, 9])
    assert drafted(ring, [1, 2, 3, 4]) == [5]


def test_the_longest_match_wins_then_the_most_frequent() -> None:
    common = [1, 2, 3, 4]
    ring = filled([9, *common, 5, 5], [*common, 6, 6], [*common, 6, 7], [8, *common, 7, 7])
    assert drafted(ring, [9, *common]) == [5, 5]
    assert drafted(ring, [0, *common])[:1] == [6]


def test_the_oldest_texts_are_forgotten_first() -> None:
    ring = filled(list(range(1000, 1100)), list(range(100)), list(range(100, 200)), size=256)
    assert drafted(ring, [1010, 1011, 1012, 1013]) == []
    assert drafted(ring, [150, 151, 152, 153]) == [154, 155, 156, 157]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), max_size=40), max_size=12),
    st.lists(st.integers(0, 3), max_size=50),
    st.integers(0, 8),
)
def test_every_draft_did_follow_such_a_suffix(
    texts: list[list[int]], suffix: list[int], max_tokens: int
) -> None:
    draft = drafted(filled(*texts), suffix, max_tokens)
    assert len(draft) <= max_tokens
    if draft:
        context = suffix[-max(MIN_MATCH, len(draft)) :]
        assert any(
            text[i : i + len(context) + len(draft)] == context + draft
            for text in texts
            for i in range(len(text))
        )


def text(start: int, size: int) -> Array:
    return np.array([*range(start, start + size - 1), BOUNDARY], np.int32)


def namespace(salt: str) -> TextNamespace:
    return TextNamespace("model", salt, "")


def test_all_namespaces_together_are_bounded_and_one_has_half_at_most() -> None:
    index = DraftIndex(2048)
    for i in range(100):
        index.remember(namespace("flood"), text(1000 * i, 500))
    assert [ring.tokens.size for ring in index.rings.values()] == [1024]
    index.remember(namespace("a"), text(0, 100))
    for i in range(100):
        index.remember(namespace("flood"), text(1000 * i, 500))
    assert set(index.rings) == {namespace("a"), namespace("flood")}
    for i in range(20):
        index.remember(namespace(f"salt {i}"), text(0, 100))
    assert sum(ring.tokens.size for ring in index.rings.values()) <= 2048
    assert index.num_bytes <= 21 * 2048
    assert namespace("a") not in index.rings
    index.configure(512)
    assert list(index.rings) == [namespace("salt 18"), namespace("salt 19")]
    index.configure(0)
    assert not index.rings
    assert index.num_bytes == 0


def test_a_smaller_bound_keeps_the_latest_texts() -> None:
    index = DraftIndex(4096)
    for start in range(0, 20_000, 200):
        index.remember(namespace(""), text(start, 200))
    index.configure(1024)
    (ring,) = index.rings.values()
    assert ring.tokens.size == 512
    assert drafted(ring, [19_850, 19_851, 19_852, 19_853]) == [19_854, 19_855, 19_856, 19_857]
    assert drafted(ring, [19_050, 19_051, 19_052, 19_053]) == []


def offered(engine: EngineSide, sequence_id: int, tokens: Tokens, num_drafts: int = 64) -> list[int]:
    """What an engine is offered behind its new tokens, of which the last is not written yet."""
    sequences = engine.manager._state.engines[engine.epoch].tables.pool.sequences
    (sequence,) = [row for row in sequences if row["sequence_id"] == sequence_id]
    num_tokens = int(sequence["num_tokens"]) + len(tokens)
    engine.room(sequence_id, len(tokens))
    columns = (int64s([sequence_id]), int32s([len(tokens)]), int32s(tokens), int32s([num_tokens - 1]))
    advance = engine.call(advance=Advance(*columns, int32s([num_drafts]))).advance
    if advance.draft_sequence_ids.size == 0:
        return []
    assert advance.draft_sequence_ids.tolist() == [sequence_id]
    assert advance.draft_base_lengths.tolist() == [num_tokens]
    assert advance.num_draft_tokens.tolist() == [advance.draft_tokens.size]
    return [int(token) for token in advance.draft_tokens]


def lived(engine: EngineSide, sequence_id: int, prompt: Tokens, output: Tokens, **options: object) -> None:
    engine.acquire(sequence_id, prompt, **options)
    engine.room(sequence_id, len(output))
    engine.advance(sequence_id, output, len(prompt) + len(output) - 1)
    engine.release(sequence_id)


PROMPT, OUTPUT = [*range(100)], [*range(5000, 5050)]


def test_a_second_request_is_offered_the_first_ones_output() -> None:
    engine = EngineSide()
    engine.acquire(1, PROMPT)
    assert offered(engine, 1, OUTPUT[:3]) == []
    engine.release(1)
    lived(engine, 2, PROMPT, OUTPUT)
    engine.acquire(3, PROMPT)
    assert offered(engine, 3, OUTPUT[:1]) == OUTPUT[1 : 1 + MAX_MATCH]
    assert offered(engine, 3, OUTPUT[1:3], num_drafts=5) == OUTPUT[3:8]
    assert offered(engine, 3, OUTPUT[3:4], num_drafts=0) == []


def test_what_is_read_from_shared_blocks_and_behind_forks_is_right() -> None:
    """The same text many times over, always longer: every length modulo the block size."""
    engine = EngineSide(num_blocks=256)
    story = [*range(7000, 7100)]
    lived(engine, 1, story[:1], story[1:])
    for i in range(2, 70):
        engine.acquire(i, story[:i])
        engine.fork(i, 1000 + i)
        engine.room(1000 + i, 1)
        assert offered(engine, 1000 + i, [story[i]])[:1] == ([story[i + 1]] if i >= 3 else [])
        engine.release(i, 1000 + i)


def test_the_ends_of_a_call_serve_those_that_ask_in_it() -> None:
    engine = EngineSide()
    engine.acquire(1, [*PROMPT, *OUTPUT])
    engine.write(1, 150)
    engine.acquire(2, PROMPT)
    engine.room(2, 1)
    advance = Advance(int64s([2]), int32s([1]), int32s(OUTPUT[:1]), int32s([100]), int32s([8]))
    answer = engine.call(advance=advance, release=Release(int64s([1])))
    assert answer.advance.draft_tokens.tolist() == OUTPUT[1:9]


def test_what_waits_has_no_text_and_a_shared_prefix_is_kept_once() -> None:
    engine = EngineSide(min_wait_blocks=2)
    engine.acquire(1, PROMPT)
    engine.acquire_together(Acquire(2, int32s(PROMPT)))
    engine.release(2)
    assert not engine.manager._state.drafts.rings
    engine.write(1, 100)
    engine.release(1)
    (ring,) = engine.manager._state.drafts.rings.values()
    assert ring.num_written[0] == 101
    lived(engine, 3, PROMPT, OUTPUT)
    assert ring.num_written[0] == 101 + 100 - 96 + MAX_MATCH + 50 + 1


def test_another_namespace_or_model_is_never_drafted_from() -> None:
    engine = EngineSide()
    lived(engine, 1, PROMPT, OUTPUT, salt="a")
    lived(engine, 2, PROMPT, OUTPUT, adapter="a")
    engine.acquire(3, PROMPT)
    assert offered(engine, 3, OUTPUT[:1]) == []
    engine.acquire(4, PROMPT, salt="a")
    assert offered(engine, 4, OUTPUT[:1]) != []
    other = EngineSide(manager=engine.manager, engine_id="other", model="another")
    other.acquire(1, PROMPT, salt="a")
    assert offered(other, 1, OUTPUT[:1]) == []


def test_engines_of_one_model_draft_from_each_other_and_outlive_their_texts() -> None:
    first = EngineSide()
    lived(first, 1, PROMPT, OUTPUT)
    again = EngineSide(manager=first.manager)  # a restarted engine
    again.acquire(1, PROMPT)
    assert offered(again, 1, OUTPUT[:1]) != []


def test_clearing_forgets_texts_and_those_still_running() -> None:
    engine = EngineSide()
    lived(engine, 1, PROMPT, OUTPUT, salt="a")
    lived(engine, 2, PROMPT, OUTPUT, salt="b")
    engine.acquire(3, PROMPT, salt="a")
    engine.manager.clear_cache(salt="a")
    assert offered(engine, 3, OUTPUT) == []
    engine.release(3)
    engine.acquire(4, PROMPT, salt="a")
    assert offered(engine, 4, OUTPUT[:1]) == []
    engine.acquire(5, PROMPT, salt="b")
    assert offered(engine, 5, OUTPUT[:1]) != []
    engine.manager.clear_cache()
    assert not engine.manager._state.drafts.rings


def test_none_is_kept_where_none_is_wanted() -> None:
    manager = MemoryManager(MemoryConfig(draft_index_tokens=0), Clock())
    engine = EngineSide(manager=manager)
    lived(engine, 1, PROMPT, OUTPUT)
    engine.acquire(2, PROMPT)
    assert offered(engine, 2, OUTPUT[:1]) == []
    assert not manager._state.drafts.rings
