"""Text to token ids and back, exact in bytes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tokenizers


@dataclass(frozen=True)
class Vocabulary:
    """What each token id means."""

    pieces: Sequence[bytes]  # by token id; b"" where an id has no text
    control_ids: frozenset[int]  # never part of what a reader sees
    end_ids: tuple[int, ...]  # the model ends its answer with one of these
    bos_id: int | None
    add_bos: bool  # the model wants its BOS before every prompt
    space_prefix: bool  # the tokenizer puts a space before the text


class Tokenizer:
    """A model's tokenizer. Thread-safe: encoding a large text belongs in a thread."""

    def __init__(self, backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
        self._backend = backend
        self.vocabulary = vocabulary
        self.pieces = vocabulary.pieces

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of `text`; exactly one BOS in front where the model wants one and `add_bos` allows."""
        # The batch call lets other threads run meanwhile and computes no offsets; the plain one does neither.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        bos_id = self.vocabulary.bos_id
        if add_bos and self.vocabulary.add_bos and bos_id is not None and ids[:1] != [bos_id]:
            ids.insert(0, bos_id)
        return ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of token ids, control tokens included; bytes that are not UTF-8 become U+FFFD."""
        ids = list(token_ids)
        text = self.decode_bytes(ids).decode("utf-8", "replace")
        first_text = next((i for i in ids if i not in self.vocabulary.control_ids), None)
        if self.vocabulary.space_prefix and ids[:1] == [first_text]:
            return text.removeprefix(" ")
        return text

    def decode_bytes(self, token_ids: Iterable[int]) -> bytes:
        pieces = self.pieces
        return b"".join([pieces[i] for i in token_ids if 0 <= i < len(pieces)])

    def token_text(self, token_id: int) -> str:
        """One token as text; a token that is only a part of a character is spelt `bytes:\\xf0\\x9f`."""
        piece = self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
