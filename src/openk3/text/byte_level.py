"""How byte-level BPE writes bytes as characters, so that a token is a string that can be printed and kept in JSON.

Bytes that are visible characters in Latin-1 stand for themselves; the others are numbered on from U+0100 (GPT-2's convention).
"""

from __future__ import annotations

_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_INVISIBLE = [byte for byte in range(256) if byte not in _VISIBLE]
BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {chr(0x100 + n): byte for n, byte in enumerate(_INVISIBLE)}
"""For each of the 256 characters the byte that it stands for."""
CHARACTERS = tuple(sorted(BYTE_OF, key=BYTE_OF.__getitem__))
"""For each byte its character."""


def byte_string(token: str) -> bytes:
    """The bytes that `token` stands for. Raises KeyError for a character that stands for no byte."""
    return bytes(BYTE_OF[character] for character in token)
