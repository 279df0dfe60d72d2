"""Stop strings and whole characters, wherever the pieces are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.engine.text_stream import StopMatcher, TextStream
from openk3.errors import UserError
from openk3.text.tokenizer import Tokenizer
from tests.engine import tiny


def feed(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    text = "".join(matcher.push(piece) for piece in pieces)
    return text + matcher.finish(), matcher.matched


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """Character by character: as soon as a stop string is complete, the longest that ends there wins."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "text", "matched"),
    [
        (["END"], ["abc", "E", "N", "D", "xyz"], "abc", "END"),
        (["END"], ["abcE", "Nxyz"], "abcENxyz", None),
        (["END"], ["abcEN"], "abcEN", None),
        (["\n\n"], ["a\n", "\nb"], "a", "\n\n"),
        (["aab"], ["aaa", "b"], "a", "aab"),
        (["abcd", "bc"], ["ab", "cd"], "a", "bc"),
        (["cd", "abcd"], ["abc", "d"], "", "abcd"),
        ([], ["abc", ""], "abc", None),
        (["x"], ["x"], "", "x"),
        (["é"], ["caf", "é"], "caf", "é"),
    ],
)
def test_stop_strings_across_pieces(stops: list[str], pieces: list[str], text: str, matched: str | None) -> None:
    assert feed(stops, pieces) == (text, matched)


def test_nothing_of_a_possible_stop_string_leaks() -> None:
    matcher = StopMatcher(["STOP", "OPEN"])
    assert [matcher.push(piece) for piece in ["go S", "T", "O", "PEN"]] == ["go ", "", "", ""]
    assert matcher.matched == "STOP" and matcher.finish() == ""
    assert matcher.push("more") == ""
    later = StopMatcher(["STOP", "OPEN"])
    assert [later.push(piece) for piece in ["STO", "PE", "N"]] == ["", "", ""]
    assert later.matched == "STOP"
    undecided = StopMatcher(["OPEN"])
    assert [undecided.push("XOP"), undecided.push("E"), undecided.push("R")] == ["X", "", "OPER"]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    st.lists(st.text("ab\n", max_size=4), max_size=8),
)
def test_any_cut_gives_what_the_whole_text_gives(stops: list[str], pieces: list[str]) -> None:
    assert feed(stops, pieces) == expected(stops, "".join(pieces))


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserError, match="stop string is empty"):
        StopMatcher(["x", ""])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tiny.tokenizer()


def test_every_emitted_piece_is_whole_characters(tokenizer: Tokenizer) -> None:
    text = "naïve 日本 𝄞 done"
    ids = [int(byte) for byte in tokenizer.encode(text)]
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == text == stream.text
    assert "\ufffd" not in "".join(pieces)


def test_stop_string_of_wide_characters_ends_the_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["本語"])
    shown = [stream.push(token) for token in tokenizer.encode("日本語です")]
    assert "".join(shown) == "日" == stream.text and stream.matched == "本語"
    assert stream.finish() == ""


def test_character_that_never_became_whole_is_replaced(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    first = tokenizer.encode("é")[:1] if len(tokenizer.encode("é")) > 1 else tokenizer.encode("𝄞")[:1]
    assert stream.push(first[0]) == ""
    assert stream.finish() == "\ufffd"
