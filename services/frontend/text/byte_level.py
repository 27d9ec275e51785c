"""The printable alphabet in which byte-level BPE vocabularies spell bytes.

Bytes that print in Latin-1 stand for themselves, the other 68 take code points from U+0100 on, in order.
"""


def _alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    letters.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return letters


BYTE_OF_LETTER = _alphabet()


def piece_bytes(piece: str) -> bytes:
    """The bytes a vocabulary entry stands for; an entry outside the alphabet stands for its own text."""
    try:
        return bytes([BYTE_OF_LETTER[letter] for letter in piece])
    except KeyError:
        return piece.encode()
