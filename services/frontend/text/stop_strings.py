"""Finds stop strings in a stream of text without ever letting a part of one out."""

from collections.abc import Sequence


class StopMatcher:
    """Releases text that no stop string can begin in any more."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Text released now. Once `matched` is set nothing of the match or after it is ever released.

        The match that is complete first wins, so the result does not depend on how the text is cut.
        """
        held = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return held[:start]
        keep = max(_overlap(held, stop) for stop in self._stops)
        cut = len(held) - keep
        self._held = held[cut:]
        return held[:cut]

    def flush(self) -> str:
        """The held text: it only looked like the beginning of a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
