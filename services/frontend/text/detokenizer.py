"""Token ids to text, one at a time, in constant time and without ever splitting a character."""

import codecs

from services.frontend.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of a growing token sequence. Bytes of an unfinished character are held until it is whole."""

    def __init__(self, tokenizer: Tokenizer, prompt_tail: bytes = b"", skip_control: bool = True) -> None:
        """`prompt_tail`: the bytes of a character that the prompt left unfinished."""
        self._pieces = tokenizer.pieces
        self._control_ids = tokenizer.vocabulary.control_ids if skip_control else frozenset[int]()
        self._held = prompt_tail
        self._prompt_may_show = bool(prompt_tail)

    @property
    def holds_bytes(self) -> bool:
        return bool(self._held)

    def push(self, token_id: int) -> str:
        """What can be said after this token. An unfinished character at the very end is never said."""
        if token_id in self._control_ids or token_id >= len(self._pieces):
            return ""
        data = self._held + self._pieces[token_id]
        text, num_used = codecs.utf_8_decode(data, "replace", False)
        self._held = data[num_used:]
        if self._prompt_may_show and text:
            self._prompt_may_show = False
            # The prompt's unfinished character was not continued: that is not the answer's to show.
            return text.lstrip("\ufffd")
        return text


def unfinished_tail(data: bytes) -> bytes:
    """The bytes at the end of `data` that begin a character without completing it."""
    _, num_used = codecs.utf_8_decode(data[-4:], "replace", False)
    return data[-4:][num_used:]
