"""From tokens to text that may be shown at once: whole characters only, and nothing that may still turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from openk3.errors import UserError
from openk3.text.stream import StreamDecoder
from openk3.text.tokenizer import Tokenizer


class StopMatcher:
    """Looks for stop strings in a text that comes in pieces, wherever the pieces are cut.

    The stop string that is complete first wins (of those complete at the same character, the longest); the text before it is all that is
    emitted. Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises UserError for an empty stop string, which would stop everywhere."""
        if any(not stop for stop in stops):
            raise UserError("a stop string is empty; it would stop before the first character")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found."""

    def push(self, piece: str) -> str:
        """Take a piece; returns the text that is now certain. After a match everything is swallowed."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        held = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """No more pieces: the text held back was no stop string after all."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """The longest end of `text` that begins `stop`."""
        return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)


class TextStream:
    """One sequence's text as its tokens come."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), skip: str = "") -> None:
        """`skip`: the beginning of the tokens' text that is not new, since it is the end of the prompt. UserError for an empty stop."""
        self._decoder = StreamDecoder(tokenizer)
        self._skip = skip
        self._matcher = StopMatcher(stops)
        self._pieces: list[str] = []

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return self._matcher.matched

    @property
    def text(self) -> str:
        """All that was emitted."""
        return "".join(self._pieces)

    def push(self, token: int) -> str:
        """Take a token; returns the text that may be shown now, valid Unicode, perhaps empty."""
        return self._emit(self._matcher.push(self._new(self._decoder.push(token))))

    def finish(self) -> str:
        """No more tokens: the rest. A character that never became whole comes out as U+FFFD."""
        return self._emit(self._matcher.push(self._new(self._decoder.finish())) + self._matcher.finish())

    def _new(self, piece: str) -> str:
        skipped = min(len(piece), len(self._skip)) if self._skip else 0
        self._skip = self._skip[skipped:]
        return piece[skipped:]

    def _emit(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece
