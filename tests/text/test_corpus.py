"""Documents from files: every kind that is promised, every fault named with its place."""

from __future__ import annotations

import gzip
import json
import os
import re
import struct
import sys
from pathlib import Path

import pytest
import zstandard

from openk3.errors import UserError
from openk3.text import corpus, packed_files
from openk3.text.corpus import CorpusReport, Document, read_documents, standard_library


def texts(*paths: str | Path) -> list[str]:
    return [document.text for document in read_documents(paths)]


def refused(*paths: str | Path) -> str:
    with pytest.raises(UserError) as caught:
        list(read_documents(paths))
    message = str(caught.value)
    assert "\n" not in message
    return message


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def packed(path: Path, content: bytes) -> Path:
    return put(path, gzip.compress(content) if path.suffix == ".gz" else zstandard.compress(content))


# What is read


def test_a_named_file_is_text_whatever_its_name(tmp_path: Path) -> None:
    for name in ("a.txt", "b", "c.json", "d.PY", "e.csv"):
        file = put(tmp_path / name, "été\r\n\tx")
        assert list(read_documents([file])) == [Document("été\r\n\tx", str(file))]
        assert texts(str(file)) == ["été\r\n\tx"]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert texts(put(tmp_path / "a.txt", "\ufeffhi\ufeff")) == ["hi\ufeff"]
    assert texts(put(tmp_path / "a.jsonl", '\ufeff{"text": "hi"}')) == ["hi"]


def test_json_lines(tmp_path: Path) -> None:
    lines = [json.dumps({"id": n, "text": text}) for n, text in enumerate(["one", "zwei\n", "\0é\ud83d\ude00"])]
    file = put(tmp_path / "a.jsonl", "\n\n".join(lines) + "\r\n \n")
    documents = list(read_documents([file]))
    assert [document.text for document in documents] == ["one", "zwei\n", "\0é😀"]
    assert [document.source for document in documents] == [f"{file}:1", f"{file}:3", f"{file}:5"]


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".GZ"])
def test_packed_files(tmp_path: Path, suffix: str) -> None:
    pack = gzip.compress if suffix.lower() == ".gz" else zstandard.compress
    text = put(tmp_path / f"a.txt{suffix}", pack(b"text"))
    lines = put(tmp_path / f"b.jsonl{suffix}", pack(b'{"text": "one"}\n{"text": "two"}'))
    assert texts(text, lines) == ["text", "one", "two"]


def test_packed_files_of_several_frames(tmp_path: Path) -> None:
    assert texts(put(tmp_path / "a.gz", gzip.compress(b"one ") + gzip.compress(b"two"))) == ["one two"]
    skippable = struct.pack("<II", 0x184D2A50, 3) + b"abc"
    frames = zstandard.compress(b"one ") + skippable + zstandard.compress(b"") + zstandard.compress(b"two") + skippable
    assert texts(put(tmp_path / "a.zst", frames)) == ["one two"]


@pytest.mark.parametrize("size", [1, 5, 64])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_chunks_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, suffix: str) -> None:
    monkeypatch.setattr(packed_files, "READ", size)
    monkeypatch.setattr(packed_files, "_PACKED_READ", size)
    text = "é日本語👩 line\n" * 5
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    assert texts(put(tmp_path / f"a.txt{suffix}", pack(text.encode()))) == [text]
    lines = [json.dumps({"text": text}, ensure_ascii=False), "", json.dumps({"text": "x"})]
    assert texts(put(tmp_path / f"a.jsonl{suffix}", pack("\n".join(lines).encode()))) == [text, "x"]


def test_a_directory_in_order_of_names(tmp_path: Path) -> None:
    for name in (
        "b.md",
        "a.txt",
        "a/z.py",
        "a/b.rst",
        "c.jsonl.gz",
        "image.png",
        "data.json",
        ".hidden.txt",
        ".git/x.txt",
        "__pycache__/x.py",
        "Makefile",
    ):
        content = name if not name.startswith("c.") else gzip.compress(json.dumps({"text": name}).encode())
        put(tmp_path / name, content)
    report = CorpusReport()
    documents = list(read_documents([tmp_path], report))
    assert [document.text for document in documents] == ["a.txt", "b.md", "c.jsonl.gz", "a/b.rst", "a/z.py"]
    assert (report.documents, report.files, report.bytes) == (5, 5, sum(len(document.text) for document in documents))
    assert report.skipped == {"not text by name": 3}
    assert str(report) == (f"5 documents, 32 bytes of text from 5 files; left out: 3 not text by name (first: {tmp_path / 'Makefile'})")


def test_several_paths_in_the_order_given(tmp_path: Path) -> None:
    one, two = put(tmp_path / "one.txt", "1"), put(tmp_path / "d" / "two.txt", "2")
    assert texts(one, two.parent) == ["1", "2"] and texts(two, one) == ["2", "1"]


def test_a_pattern(tmp_path: Path) -> None:
    for name in ("b.log", "a.log", "d/c.log", "x.txt"):
        put(tmp_path / name, name)
    assert texts(f"{tmp_path}/*.log") == ["a.log", "b.log"]
    assert texts(f"{tmp_path}/**/*.log") == ["a.log", "b.log", "d/c.log"]
    assert "matches no file" in refused(f"{tmp_path}/*.md")
    # A file that really has such a name is that file.
    assert texts(put(tmp_path / "[ab].log", "literal")) == ["literal"]


def test_a_file_that_comes_twice_is_read_once(tmp_path: Path) -> None:
    file = put(tmp_path / "a.txt", "once")
    (tmp_path / "link.txt").symlink_to(file)
    report = CorpusReport()
    assert len(list(read_documents([file, tmp_path, f"{tmp_path}/a.t*"], report))) == 1
    assert report.skipped == {"given twice": 3}


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    put(tmp_path / "a.txt", "x")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    assert texts(tmp_path) == ["x"]


def test_a_long_document_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PART", 100)
    monkeypatch.setattr(packed_files, "READ", 16)
    text = "".join(f"line {n} é\n    indented\n" for n in range(50))
    report = CorpusReport()
    documents = list(read_documents([put(tmp_path / "a.txt", text), put(tmp_path / "b.txt", "short")], report))
    assert "".join(document.text for document in documents[:-1]) == text
    assert [document.continues for document in documents] == [False] + [True] * (len(documents) - 2) + [False]
    assert len(documents) > 8 and all(len(document.text) < 150 for document in documents)
    assert all(document.text.startswith("line") for document in documents[:-1])
    assert (report.documents, report.files, report.bytes) == (2, 2, len(text.encode()) + 5)


def test_a_long_line_comes_in_parts_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PART", 100)
    monkeypatch.setattr(packed_files, "READ", 16)
    parts = texts(put(tmp_path / "a.txt", "x" * 1000))
    assert "".join(parts) == "x" * 1000 and len(parts) > 5


# What is left out of a directory, and counted


def test_a_directory_without_what_is_not_text(tmp_path: Path) -> None:
    put(tmp_path / "a.txt", "good")
    put(tmp_path / "b.txt", b"bin\0ary")
    put(tmp_path / "c.txt", "café".encode("latin-1"))
    put(tmp_path / "d.txt", b"")
    (tmp_path / "e.txt").symlink_to(tmp_path / "nowhere")
    report = CorpusReport()
    assert [document.text for document in read_documents([tmp_path], report)] == ["good"]
    assert report.skipped == {"binary": 1, "not UTF-8": 1, "empty": 1, "not a regular file": 1}
    assert report.examples["binary"] == str(tmp_path / "b.txt")
    assert str(report).endswith(f"1 not a regular file ({tmp_path / 'e.txt'})")


def test_some_empty(tmp_path: Path) -> None:
    report = CorpusReport()
    files = [put(tmp_path / "a.txt", ""), put(tmp_path / "b.txt", "x"), put(tmp_path / "c.jsonl", '{"text": ""}\n{"text": "y"}\n')]
    assert [document.text for document in read_documents(files, report)] == ["x", "y"]
    assert report.skipped == {"empty": 1, "empty texts": 1}


def test_faults_found_after_parts_were_given_out_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "PART", 100)
    monkeypatch.setattr(packed_files, "READ", 16)
    file = put(tmp_path / "a.txt", b"x\n" * 500 + b"\xff")
    assert refused(tmp_path) == f"{file} is not UTF-8 text: byte 0xff at offset 1,000"


# Faults


def test_nothing_named() -> None:
    assert refused() == "no text was named: give files or directories"


def test_a_missing_path(tmp_path: Path) -> None:
    assert refused(tmp_path / "no" / "file.txt") == f"{tmp_path / 'no' / 'file.txt'} does not exist"


def test_no_text_at_all(tmp_path: Path) -> None:
    empty = put(tmp_path / "empty.txt", "")
    assert refused(empty) == f"there is no text in {empty}; left out: 1 empty ({empty})"
    other = put(tmp_path / "d" / "a.bin", "x")
    assert refused(other.parent) == f"there is no text in {other.parent}; left out: 1 not text by name ({other})"
    (tmp_path / "bare").mkdir()
    assert refused(tmp_path / "bare") == f"there is no text in {tmp_path / 'bare'}"
    assert "empty" in refused(packed(tmp_path / "a.txt.zst", b"")) and "empty" in refused(packed(tmp_path / "a.txt.gz", b""))


def test_binary(tmp_path: Path) -> None:
    file = put(tmp_path / "a.txt", b"abc\0def")
    assert refused(file) == f"{file} is not text: there is a zero byte at offset 3"
    assert "zero byte at offset 1" in refused(put(tmp_path / "utf16.txt", "ab".encode("utf-16-le")))


@pytest.mark.parametrize(
    ("content", "offset"),
    [(b"ab\xe9cd", 2), (b"\xff\xfea", 0), (b"abc\xe2\x82", 3), (b"\xed\xa0\x80", 0), ("é".encode() * 5 + b"\xc3(", 10)],
)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_not_utf8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, offset: int, size: int) -> None:
    monkeypatch.setattr(packed_files, "READ", size)
    file = put(tmp_path / "a.txt", content)
    assert refused(file) == f"{file} is not UTF-8 text: byte 0x{content[offset]:02x} at offset {offset}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", 'holds no JSON object but list: each line must be like {"text": "…"}'),
        ('"text"', "holds no JSON object but str"),
        ("{", "is not JSON: Expecting property name"),
        ('{"text": "a', "is not JSON: Unterminated string"),
        ("[" * 100_000, "is not JSON"),
        ('{"a": 1, "b": 2}', "has no \"text\", only 'a', 'b'"),
        ("{}", 'has no "text", only nothing'),
        ('{"text": 3}', '"text" is int, not a string'),
        ('{"text": null}', '"text" is NoneType, not a string'),
        ('{"text": "ab\\ud800"}', 'character 2 of "text" is half of a surrogate pair'),
        (b'{"text": "\xff"}', "is not UTF-8: byte 0xff at offset 10 of the line"),
        ("{\0}", "is not JSON"),
    ],
)
def test_faults_of_a_line(tmp_path: Path, line: str | bytes, message: str) -> None:
    line = line.encode() if isinstance(line, str) else line
    file = put(tmp_path / "a.jsonl", b'{"text": "good"}\n\n' + line + b"\n")
    assert refused(file).startswith(f"{file}, line 3") and message in refused(file)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_packed_files(tmp_path: Path, suffix: str) -> None:
    good = packed(tmp_path / f"a.txt{suffix}", os.urandom(3000).hex().encode()).read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 0xFF
    for content in (good[:-3], good[: len(good) // 2], good[:2], b"no such thing", good + b"junk", bytes(flipped)):
        file = put(tmp_path / f"b.txt{suffix}", content)
        if suffix == ".zst" and content == bytes(flipped):
            # Without a checksum the library cannot see every flipped bit; what it gives is then read, or refused as text.
            try:
                list(read_documents([file]))
            except UserError:
                pass
        else:
            assert refused(file).startswith(f"{file} is damaged or cut off: ")


def test_zstd_with_a_checksum_sees_a_flipped_bit(tmp_path: Path) -> None:
    content = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(os.urandom(3000).hex().encode()))
    content[len(content) // 2] ^= 1
    assert "is damaged or cut off" in refused(put(tmp_path / "a.zst", bytes(content)))


def test_a_bomb_is_read_a_little_at_a_time(tmp_path: Path) -> None:
    file = packed(tmp_path / "a.zst", b"\n" * 50_000_000)
    assert max(len(chunk) for chunk in packed_files.chunks(file)) < 1 << 26


@pytest.mark.skipif(os.name != "posix", reason="needs named pipes")
def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert refused(tmp_path / "pipe") == f"{tmp_path / 'pipe'} is not a regular file"


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = put(tmp_path / "a.txt", "x")

    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert refused(file) == f"{file} cannot be read: Permission denied"


# The standard library


def test_the_standard_library() -> None:
    files = standard_library()
    names = [path.name for path in files]
    assert {"argparse.py", "dataclasses.py", "typing.py", "decoder.py"} <= set(names)
    assert len(files) > 300 and len(set(files)) == len(files) and files == standard_library()
    parts = {part for path in files for part in path.parts[-3:]}
    assert not parts & {"test", "tests", "site-packages", "dist-packages", "encodings", "pydoc_data", "lib2to3", "__pycache__"}
    assert not [path for path in files if path.parts[-2:] == ("html", "entities.py") or path.name.startswith("_sysconfigdata")]
    report = CorpusReport()
    for document in read_documents(files, report):
        assert document.text
    assert report.bytes > 5_000_000 and set(report.skipped) <= {"empty"}


def test_a_python_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(UserError, match=re.escape(f"no sources of its standard library in {tmp_path}")):
        standard_library()


def test_reading_holds_one_document_at_a_time(tmp_path: Path) -> None:
    for n in range(50):
        put(tmp_path / f"{n:02}.txt", "x" * 1_000_000)
    reader = read_documents([tmp_path])
    held = next(reader)
    assert sys.getsizeof(held.text) < 1_100_000
    report = CorpusReport()
    reader = read_documents([tmp_path], report)
    next(reader)
    assert report.documents == 1
