"""Text from tokens that come one at a time. A character may be spread over several tokens; what is shown is always whole."""

from __future__ import annotations

import codecs

from openk3.text.tokenizer import Tokenizer


class StreamDecoder:
    """Emits text as soon as it is certain.

    What comes out, joined, is `tokenizer.decode` of all ids: nothing is lost, and U+FFFD stands for bytes that turned out not to be UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False) -> None:
        """`skip_special`: control tokens give no text; else they show by name."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Take one id; returns the characters that are whole now, perhaps none. Raises ValueError for an id outside the vocabulary."""
        return self._decoder.decode(self._tokenizer.bytes_of(token, self._skip_special))

    def finish(self) -> str:
        """No more ids: what is left of a character that never became whole, as U+FFFD. The decoder can then begin anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
