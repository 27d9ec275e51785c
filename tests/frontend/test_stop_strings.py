"""The matcher against a plain search over the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from services.frontend.text.stop_strings import StopMatcher

TEXTS = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=4)


def plain_search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The stop that is complete first ends the text; of two complete at once the longer one."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(1, 5), max_size=30))
def test_the_result_does_not_depend_on_the_cuts(text: str, stops: list[str], cuts: list[int]) -> None:
    expected, expected_stop = plain_search(text, stops)
    matcher, released, rest = StopMatcher(stops), "", text
    for size in [*cuts, len(text)]:
        released += matcher.push(rest[:size])
        rest = rest[size:]
        assert expected.startswith(released)
        if matcher.matched is not None:
            break
    if matcher.matched is None:
        released += matcher.flush()
    assert (released, matcher.matched) == (expected, expected_stop)


@given(text=TEXTS, stops=STOPS)
def test_text_is_released_as_soon_as_it_can_be(text: str, stops: list[str]) -> None:
    matcher, released = StopMatcher(stops), ""
    for letter in text:
        released += matcher.push(letter)
        if matcher.matched is not None:
            return
    held = text.removeprefix(released)
    assert held == "" or any(stop.startswith(held) for stop in stops)
