"""Words that an answer must not contain, as tokens."""

from collections.abc import Iterable

from services.errors import invalid
from services.frontend.rules import shown
from services.frontend.text.tokenizer import Tokenizer

# Every step compares them with what was said.
MAX_TOKENS = 2048


def token_sequences(words: Iterable[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Each word as it is at the start of a text, as it is behind a space, where that is not the same tokens
    with others in front, and as it is within a text, where the tokenizer puts a space before every text.

    Raises ServiceError for a word without any token, and for too many tokens.
    """
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ") or word
        alone = _encode(bare, tokenizer)
        if not alone:
            raise invalid("bad_words", f"bad_words must not have a word without tokens, got {shown(word)}")
        behind_space = _encode(f" {bare}", tokenizer)
        within = _within(bare, tokenizer) if tokenizer.vocabulary.space_prefix else alone
        forms = [alone, within] + ([behind_space] if behind_space[-len(alone) :] != alone else [])
        sequences.update(dict.fromkeys(filter(None, forms)))
    num_tokens = sum(map(len, sequences))
    if num_tokens > MAX_TOKENS:
        raise invalid("bad_words", f"bad_words must have at most {MAX_TOKENS} tokens, got {num_tokens}")
    return list(sequences)


def _encode(text: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_bos=False))


def _within(word: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """As it is behind a line's end; nothing where it merges with that."""
    line_end, both = _encode("\n", tokenizer), _encode(f"\n{word}", tokenizer)
    return both[len(line_end) :] if both[: len(line_end)] == line_end else ()
