"""The draft index as a plain Python program: texts in a list, searched from end to end."""

from collections import Counter
from collections.abc import Callable

Namespace = tuple[str, str]

SHORTEST, LONGEST, MOST = 4, 64, 16  # matched tokens, and matches that are compared


class Texts:
    """Of one model. `max_tokens` bounds all namespaces together, one may have half of it."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.size: dict[Namespace, int] = {}  # by the age of the last text
        self.kept: dict[Namespace, list[int | None]] = {}  # None behind each text

    def remember(self, namespace: Namespace, text: list[int]) -> None:
        if self.max_tokens == 0:
            return
        kept = [*self.kept.get(namespace, []), *text, None]
        size = self.size.pop(namespace, 256)
        while len(kept) > size and 2 * size <= self.max_tokens / 2:
            size *= 2
        self.size[namespace], self.kept[namespace] = size, kept[-size:]
        while sum(self.size.values()) > self.max_tokens and len(self.size) > 1:
            oldest = next(iter(self.size))
            del self.size[oldest], self.kept[oldest]

    def forget(self, condition: Callable[[Namespace], bool]) -> None:
        for namespace in list(self.size):
            if condition(namespace):
                del self.size[namespace], self.kept[namespace]

    def draft(self, namespace: Namespace, tokens: list[int], num_wanted: int) -> list[int]:
        kept = self.kept.get(namespace, [])
        ends = [
            end
            for end in range(len(kept), SHORTEST - 1, -1)
            if kept[end - SHORTEST : end] == tokens[-SHORTEST:]
        ][:MOST]
        longest = max([_match(kept[:end], tokens) for end in ends], default=0)
        ends = [end for end in ends if _match(kept[:end], tokens) == longest]
        draft: list[int] = []
        while len(draft) < min(num_wanted, longest):
            following = Counter(token for end in ends if (token := kept[end]) is not None)
            if not following:
                break
            winner, _ = following.most_common(1)[0]  # of equals the first met: the latest
            draft.append(winner)
            ends = [end + 1 for end in ends if kept[end] == winner]
        return draft


def _match(before: list[int | None], tokens: list[int]) -> int:
    length = 0
    while length < min(LONGEST, len(before), len(tokens)) and before[-1 - length] == tokens[-1 - length]:
        length += 1
    return length
