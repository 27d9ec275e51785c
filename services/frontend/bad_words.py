"""Words that an answer must not contain, as tokens."""

from collections.abc import Iterable

from services.errors import invalid
from services.frontend.rules import shown
from services.frontend.text.tokenizer import Tokenizer


def token_sequences(words: Iterable[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Each word as it is at the start of a text and as it is behind a space, where that is not the same
    tokens with others in front. Raises ServiceError for a word without any token."""
    sequences: list[list[int]] = []
    for word in words:
        bare = word.lstrip(" ") or word
        alone = tokenizer.encode(bare, add_bos=False)
        if not alone:
            raise invalid("bad_words", f"bad_words must not have a word without tokens, got {shown(word)}")
        sequences.append(alone)
        behind_space = tokenizer.encode(f" {bare}", add_bos=False)
        if behind_space[-len(alone) :] != alone:
            sequences.append(behind_space)
    return sequences
