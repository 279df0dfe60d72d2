"""Streaming: always whole characters, nothing lost, what comes out is what decoding at once gives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.text.stream import StreamDecoder
from openk3.text.tokenizer import CONTROL_TOKENS, Tokenizer
from tests.text.samples import small

TEXT = "naïve — 日本語 👩‍👩‍👧 \0 ok"


def outputs(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    decoder = StreamDecoder(tokenizer, **options)
    return [*(decoder.push(token) for token in ids), decoder.finish()]


def test_characters_appear_when_they_are_whole() -> None:
    assert outputs(small(), list("é€👩a".encode())) == ["", "é", "", "", "€", "", "", "", "👩", "a", ""]


def test_every_cut_of_a_text() -> None:
    ids = small().encode(TEXT)
    for cut in range(len(ids) + 1):
        decoder = StreamDecoder(small())
        first = "".join(decoder.push(token) for token in ids[:cut])
        assert TEXT.startswith(first)
        rest = "".join(decoder.push(token) for token in ids[cut:]) + decoder.finish()
        assert first + rest == TEXT


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(0, 399), st.sampled_from([0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0xC3, 0xFF, 0xED, 0xA0, 0x80, 394])), max_size=30
    )
)
def test_any_ids_give_what_decoding_at_once_gives(ids: list[int]) -> None:
    pieces = outputs(small(), ids)
    assert "".join(pieces) == small().decode(ids)
    for piece in pieces:
        piece.encode("utf-8")


def test_invalid_bytes_show_once_it_is_certain() -> None:
    # E2 82 may become €; 61 settles that it does not. FF can begin nothing.
    assert outputs(small(), [0xE2, 0x82, 0x61, 0xFF, 0x62]) == ["", "", "\ufffda", "\ufffd", "b", ""]
    # A surrogate written as UTF-8, and more than U+10FFFF, are no characters.
    assert "".join(outputs(small(), [0xED, 0xA0, 0x80])) == "\ufffd" * 3
    assert "".join(outputs(small(), [0xF4, 0x90, 0x80, 0x80])) == "\ufffd" * 4


def test_what_never_became_whole_is_not_lost() -> None:
    assert outputs(small(), [0x61, 0xF0, 0x9F, 0x91]) == ["a", "", "", "", "\ufffd"]


def test_after_the_end_it_begins_anew() -> None:
    decoder = StreamDecoder(small())
    decoder.push(0xE2)
    assert decoder.finish() == "\ufffd" and decoder.finish() == ""
    assert decoder.push(0x61) == "a"


def test_control_tokens_show_by_name_or_not_at_all() -> None:
    ids = [0x61, *small().special_ids.values(), 0xC3, 394, 0xA9]
    assert "".join(outputs(small(), ids)) == "a" + "".join(CONTROL_TOKENS) + "\ufffd[EOS]\ufffd"
    assert "".join(outputs(small(), ids[:-3], skip_special=True)) == "a"


def test_an_id_outside_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="token id 400"):
        StreamDecoder(small()).push(400)
