"""Files of tokens: what is written comes back, damage is refused, and the held-out part is fair and apart."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from openk3.errors import UserError
from openk3.text import token_file as module
from openk3.text.corpus import Document, read_documents
from openk3.text.token_file import HEADER_BYTES, Part, TokenFile, encode_corpus
from openk3.text.tokenizer import Tokenizer
from tests.text.samples import CODE, PROSE, small

BOS, EOS = 393, 394


def write(path: Path, lengths: list[int], start: int = 0) -> TokenFile:
    """Documents of so many tokens, BOS and EOS counted, no two alike."""
    documents, state = [], np.random.default_rng(start)
    for length in lengths:
        documents.append(state.integers(0, 256, length - 2).tolist())
    return TokenFile.write(path / "tokens.bin", documents, small())


def targets(part: Part) -> list[int]:
    """Positions in the file that the part predicts."""
    return [n for start, end in zip(part.starts.tolist(), part.ends.tolist(), strict=True) for n in range(start + 1, end)]


def check_apart(file: TokenFile, train: Part, heldout: Part) -> None:
    """Between them the two parts predict every token but the first of each document, once."""
    both = targets(train) + targets(heldout)
    assert len(both) == len(set(both)) == train.predictions + heldout.predictions
    firsts = set(file.offsets[:-1].tolist())
    assert sorted(both) == [n for n in range(len(file.tokens)) if n not in firsts]
    # No training piece reads a token that is held out.
    held = set(targets(heldout))
    assert all(not held & set(range(start, end)) for start, end in zip(train.starts.tolist(), train.ends.tolist(), strict=True))


# What is written


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    documents = [[1, 2, 3], [], [392, 0]]
    file = TokenFile.write(tmp_path / "new" / "t.bin", documents, small())
    assert file.documents == 3 and file.vocab_size == 400
    assert [file.document(n).tolist() for n in range(3)] == [[BOS, *ids, EOS] for ids in documents]
    assert file.tokens.dtype == np.uint16 and file.header["tokenizer"] == small().fingerprint
    assert file.text_lengths.tolist() == list(small().text_lengths)
    file.verify()
    assert os.listdir(tmp_path / "new") == ["t.bin"]


def test_the_layout_on_disk(tmp_path: Path) -> None:
    path = TokenFile.write(tmp_path / "t.bin", [[7], [300]], small()).path
    data = path.read_bytes()
    assert json.loads(data[:HEADER_BYTES])["tokens"] == 6
    assert np.frombuffer(data[HEADER_BYTES : HEADER_BYTES + 12], "<u2").tolist() == [BOS, 7, EOS, BOS, 300, EOS]
    assert np.frombuffer(data[HEADER_BYTES + 16 : HEADER_BYTES + 40], "<i8").tolist() == [0, 3, 6]
    assert len(data) == HEADER_BYTES + 16 + 24 + 16 + 4 * 400


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    large = Tokenizer.train([CODE], 70_000)
    file = TokenFile.write(tmp_path / "t.bin", [[5, 69_000]], large)
    assert file.tokens.dtype == np.uint32 and file.document(0).tolist() == [69_993, 5, 69_000, 69_994]
    assert Tokenizer.train([CODE], 1 << 16).vocab_size - 1 == np.iinfo(np.uint16).max


def test_tokens_are_mapped_not_read(tmp_path: Path) -> None:
    tokens = write(tmp_path, [50]).tokens
    base = tokens
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap) or type(base).__name__ == "mmap"
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_a_corpus_is_encoded_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [Document(text, "x") for text in (CODE, PROSE, "é", "[EOS]")]
    for group in (1, 100, 1 << 22):
        monkeypatch.setattr(module, "_GROUP", group)
        file = encode_corpus(iter(documents), small(), tmp_path / "t.bin")
        assert [file.document(n).tolist() for n in range(4)] == [[BOS, *small().encode(one.text), EOS] for one in documents]
        assert sum(small().text_lengths[token] for token in file.tokens.tolist()) == sum(len(one.text.encode()) for one in documents)


@pytest.mark.parametrize("group", [1, 30, 1 << 22])
def test_parts_of_a_document_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: int) -> None:
    monkeypatch.setattr(module, "_GROUP", group)
    parts = [("one ", False), ("two ", True), ("three", True), ("four", False), ("five ", False), ("six", True)]
    file = encode_corpus((Document(text, "x", continues) for text, continues in parts), small(), tmp_path / "t.bin")
    decoded = [small().decode(file.document(n).tolist(), skip_special=True) for n in range(file.documents)]
    assert decoded == ["one two three", "four", "five six"]
    assert (file.tokens == BOS).sum() == (file.tokens == EOS).sum() == 3


def test_parts_from_a_long_file_give_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openk3.text.corpus.PART", 200)
    monkeypatch.setattr("openk3.text.packed_files.READ", 50)
    (tmp_path / "a.txt").write_text(CODE * 20)
    file = encode_corpus(read_documents([tmp_path / "a.txt"]), small(), tmp_path / "t.bin")
    assert file.documents == 1 and file.document(0).tolist() == [BOS, *small().encode(CODE * 20), EOS]


def test_nothing_to_write(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no document"):
        TokenFile.write(tmp_path / "t.bin", [], small())
    with pytest.raises(UserError, match="no document"):
        encode_corpus([], small(), tmp_path / "t.bin")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("wrong", [-1, 400, 1 << 40])
def test_ids_outside_the_vocabulary(tmp_path: Path, wrong: int) -> None:
    with pytest.raises(UserError, match=f"token id {wrong}, outside the vocabulary of 400"):
        TokenFile.write(tmp_path / "t.bin", [[1], [2, wrong]], small())


def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write(tmp_path, [40]).fingerprint

    def documents():  # type: ignore[no-untyped-def]
        yield [1, 2]
        raise UserError("the reader failed")

    with pytest.raises(UserError, match="the reader failed"):
        TokenFile.write(tmp_path / "tokens.bin", documents(), small())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"tokens\.bin cannot be written: No space left on device"):
        TokenFile.write(tmp_path / "tokens.bin", [[1]], small())
    assert TokenFile.open(tmp_path / "tokens.bin").fingerprint == old
    assert os.listdir(tmp_path) == ["tokens.bin"]


# Damage


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no\.bin cannot be read: No such file"):
        TokenFile.open(tmp_path / "no.bin")


def test_every_length_but_the_right_one_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, [30, 20]).path
    data = path.read_bytes()
    for size in [0, 1, 100, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(UserError, match="write it anew"):
            TokenFile.open(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(UserError, match=f"it has {len(data) + 1:,} bytes, its header says {len(data):,}"):
        TokenFile.open(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "is not a file of tokens"),
        ({"version": 2}, "version 2 of its format; this program reads version 1"),
        ({"version": "1"}, "is not a file of tokens"),
        ({"dtype": "float16"}, "header is not complete"),
        ({"tokens": -1}, "header is not complete"),
        ({"tokens": 1 << 60}, "header is not complete"),
        ({"tokens": 51}, "its header says"),
        ({"documents": 2.0}, "header is not complete"),
        ({"documents": None}, "header is not complete"),
        ({"tokenizer": 5}, "header is not complete"),
    ],
)
def test_a_header_that_is_wrong(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write(tmp_path, [30, 25]).path
    data = path.read_bytes()
    header = json.loads(data[:HEADER_BYTES]) | change
    path.write_bytes(json.dumps(header).encode().ljust(HEADER_BYTES) + data[HEADER_BYTES:])
    with pytest.raises(UserError, match=message):
        TokenFile.open(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    for content in (b"[]" * 5000, b"\xff" * 5000, b'"format"'.ljust(5000)):
        (tmp_path / "t.bin").write_bytes(content)
        with pytest.raises(UserError, match="is not a file of tokens"):
            TokenFile.open(tmp_path / "t.bin")


def test_offsets_that_do_not_fit(tmp_path: Path) -> None:
    path = write(tmp_path, [32, 32]).path
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 128 + 8] = 99
    path.write_bytes(data)
    with pytest.raises(UserError, match="offsets do not fit"):
        TokenFile.open(path)


def test_verify_sees_one_changed_token(tmp_path: Path) -> None:
    path = write(tmp_path, [32, 32]).path
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 20] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="content is not what was written"):
        TokenFile.open(path).verify()


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, [32]).path
    assert TokenFile.open(path, small()).documents == 1
    other = Tokenizer.train([PROSE], 400)
    with pytest.raises(UserError, match=f"another tokenizer .fingerprint {small().fingerprint[:12]}…, not {other.fingerprint[:12]}…"):
        TokenFile.open(path, other)


# Held-out


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_a_split_into_whole_documents(tmp_path: Path, fraction: float, seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(2, 40, 200).tolist()
    file = write(tmp_path, lengths, seed)
    train, heldout = file.split(fraction)
    check_apart(file, train, heldout)
    held = int((heldout.ends - heldout.starts).sum())
    assert 0.6 * fraction * len(file.tokens) < held <= fraction * len(file.tokens) + 1
    assert (train.name, heldout.name) == ("train", "heldout")


def test_a_split_by_tokens(tmp_path: Path) -> None:
    file = write(tmp_path, [20] * 100)
    train, heldout = file.split(heldout_tokens=205)
    assert len(heldout.starts) == 10 and heldout.predictions == 190 and train.predictions == 90 * 19
    check_apart(file, train, heldout)


def test_the_choice_depends_on_the_texts_alone(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    documents = [draw.integers(0, 256, 30).tolist() for _ in range(60)]

    def held(order: list[int]) -> set[tuple[int, ...]]:
        file = TokenFile.write(tmp_path / "t.bin", [documents[n] for n in order], small())
        _, part = file.split(0.2)
        return {tuple(file.tokens[start + 1 : end - 1].tolist()) for start, end in zip(part.starts, part.ends, strict=True)}

    forwards = held(list(range(60)))
    assert len(forwards) == 12 and held(list(reversed(range(60)))) == forwards and held(list(range(60))) == forwards


def test_copies_stay_together(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    originals = [draw.integers(0, 256, 20).tolist() for _ in range(40)]
    file = TokenFile.write(tmp_path / "t.bin", [*originals, *originals[::2], *originals[::4]], small())
    train, heldout = file.split(0.3)
    check_apart(file, train, heldout)
    texts = [{tuple(file.tokens[s:e].tolist()) for s, e in zip(part.starts, part.ends, strict=True)} for part in (train, heldout)]
    assert not texts[0] & texts[1] and len(texts[0]) + len(texts[1]) == 40


def test_one_long_document_is_divided(tmp_path: Path) -> None:
    file = write(tmp_path, [1000])
    train, heldout = file.split(0.05)
    assert (train.starts.tolist(), train.ends.tolist()) == ([0], [950])
    assert (heldout.starts.tolist(), heldout.ends.tolist()) == ([949], [1000])
    check_apart(file, train, heldout)


def test_a_few_long_documents_are_divided(tmp_path: Path) -> None:
    file = write(tmp_path, [10_000, 12_000, 5])
    train, heldout = file.split(0.02)
    check_apart(file, train, heldout)
    # The short one alone would be no sample.
    assert heldout.predictions > 400 and len(heldout.starts) == 2 and len(train.starts) == 2


@pytest.mark.parametrize("fraction", [0.5, 0.01, 0.99])
def test_too_little_text(tmp_path: Path, fraction: float) -> None:
    for lengths in ([2], [3], [2, 2] if fraction != 0.5 else [3]):
        with pytest.raises(UserError, match=r"give more text|cannot be divided"):
            write(tmp_path, lengths).split(fraction)


def test_copies_of_one_text_cannot_be_divided(tmp_path: Path) -> None:
    file = TokenFile.write(tmp_path / "t.bin", [[1, 2, 3]] * 100, small())
    with pytest.raises(UserError, match=r"100 documents, 1 of them different, and 50 of its 500 tokens are to be held out"):
        file.split(0.1)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan")])
def test_shares_that_are_none(tmp_path: Path, fraction: float) -> None:
    with pytest.raises(UserError, match="must be above 0 and below 1"):
        write(tmp_path, [50, 50]).split(fraction)


def test_numbers_of_tokens_that_cannot_be_held_out(tmp_path: Path) -> None:
    file = write(tmp_path, [50, 50])
    for tokens in (0, 1, 99, 1000, -5):
        with pytest.raises(UserError, match=f"has 100 tokens, of which {tokens:,} cannot be held out"):
            file.split(heldout_tokens=tokens)
    for wrong in ({}, {"heldout_fraction": 0.5, "heldout_tokens": 20}):
        with pytest.raises(ValueError, match="heldout_fraction or heldout_tokens"):
            file.split(**wrong)


def test_the_whole(tmp_path: Path) -> None:
    file = write(tmp_path, [5, 2, 9])
    assert file.whole().predictions == 4 + 1 + 8
    assert file.whole().fingerprint == file.whole().fingerprint != file.split(0.3)[0].fingerprint
