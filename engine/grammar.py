"""The seam to a grammar library: which tokens may follow where an output has to obey a grammar."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]


class GrammarMatcher(Protocol):
    """Where one output stands in its grammar.

    At least one token is always allowed; where the output may end, the model's end tokens are among them.
    They are accepted like others, and behind one anything may be allowed: nobody will see it. Nothing raises,
    and the last 32 tokens can be taken back.
    """

    def accept(self, token: int) -> bool:
        """Moves behind a token; False, and stays, where it is not allowed."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Takes the last accepted tokens back."""
        ...

    def fill_mask(self, mask: Int32) -> None:
        """Writes what is allowed here: bit t % 32 of word t // 32 is token t; int32 [ceil(vocab / 32)]."""
        ...


class Grammar(Protocol):
    """A compiled grammar; any number of outputs may follow it at the same time."""

    def start(self) -> GrammarMatcher:
        """At the beginning of an output."""
        ...


@contextmanager
def ahead(matcher: GrammarMatcher, tokens: Sequence[int]) -> Iterator[bool]:
    """Inside, the matcher stands behind `tokens`, or before the first that is not allowed.

    Answers whether all of them are.
    """
    num_accepted = next((i for i, token in enumerate(tokens) if not matcher.accept(token)), len(tokens))
    try:
        yield num_accepted == len(tokens)
    finally:
        matcher.rollback(num_accepted)


def is_legal(matcher: GrammarMatcher, tokens: Sequence[int]) -> bool:
    """Whether these tokens may follow."""
    with ahead(matcher, tokens) as all_allowed:
        return all_allowed


def allowed_tokens(matcher: GrammarMatcher, vocab_size: int) -> Bool:
    """Whether each token may follow, bool [vocab_size]."""
    mask = np.zeros(-(-vocab_size // 32), np.int32)
    matcher.fill_mask(mask)
    bits = np.unpackbits(mask.astype("<i4", copy=False).view(np.uint8), count=vocab_size, bitorder="little")
    return bits.view(np.bool_)
