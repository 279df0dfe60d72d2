"""Documents from files and directories, one at a time.

- A file that is named is read as text, whatever it is called; `.gz` and `.zst` are unpacked. Text is UTF-8; a byte order mark is dropped.
- `.jsonl` (also packed) holds one JSON object a line, with the document under "text". Empty lines are passed over.
- A directory is searched, in order of names, for the files whose names say that they are text (`TEXT_SUFFIXES`). What begins with a dot is
  left out, and so is `__pycache__`. A file found there that is binary or not UTF-8 is left out and counted; one that is named is an error.
- A path that does not exist and holds `*`, `?` or `[…]` is a pattern; the files it matches count as named.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from openk3.errors import UserError
from openk3.text.packed_files import READ, chunks, lines, unpacked_suffix

TEXT_SUFFIXES = frozenset(
    ".txt .text .md .markdown .rst .tex .org .jsonl .py .pyi .c .h .cc .cpp .hpp .rs .go .js .ts .java .kt .rb .lua .sh .sql .toml".split()
)
"""What is read from a directory, also with `.gz` or `.zst` behind it. JSON, CSV, HTML and the like are data: they are read when named."""

PART = 1 << 22
"""Characters. A longer document comes in parts, so that no file need fit into memory. What is wrong behind the first part of a file is an
error also in a directory."""

NOT_SOURCES = frozenset(
    "test tests idle_test site-packages dist-packages __pycache__ __phello__ encodings pydoc_data lib2to3 msilib html/entities.py".split()
)
"""Of the standard library: tests, what was installed into it, and tables (character sets, help texts, grammars) rather than programs."""

_PART_END = re.compile(r"\n(?=\S)")


@dataclass(frozen=True)
class Document:
    """One text."""

    text: str
    source: str
    """The file, and for .jsonl the line."""
    continues: bool = False
    """This is a further part of the document before it."""


@dataclass
class CorpusReport:
    """What was read; filled in while reading."""

    documents: int = 0
    bytes: int = 0
    """Of text, in UTF-8."""
    files: int = 0
    """That gave a document."""
    skipped: Counter[str] = field(default_factory=Counter)
    """How many files or lines were left out, by reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """For each reason the first one."""

    def skip(self, reason: str, source: str) -> None:
        """Count something that is left out."""
        self.skipped[reason] += 1
        self.examples.setdefault(reason, source)

    def __str__(self) -> str:
        """One line."""
        read = f"{_count(self.documents, 'document')}, {_count(self.bytes, 'byte')} of text from {_count(self.files, 'file')}"
        left_out = [f"{count:,} {reason} ({'first: ' * (count > 1)}{self.examples[reason]})" for reason, count in self.skipped.items()]
        return "; left out: ".join([read, ", ".join(left_out)] if left_out else [read])


def read_documents(paths: Iterable[str | os.PathLike[str]], report: CorpusReport | None = None) -> Iterator[Document]:
    """The documents in `paths`, in the order given; a file that comes twice is read once.

    Raises UserError, naming the place, for what cannot be read, and at the end when there was no text at all.
    """
    report = CorpusReport() if report is None else report
    names = [os.fspath(path) for path in paths]
    if not names:
        raise UserError("no text was named: give files or directories")
    seen: set[tuple[int, int]] = set()
    for name in names:
        for file, named in _files(name, report):
            try:
                status = file.stat()
            except OSError as error:
                raise UserError(f"{file} cannot be read: {error.strerror or error}") from error
            if (status.st_dev, status.st_ino) in seen:
                report.skip("given twice", str(file))
            else:
                seen.add((status.st_dev, status.st_ino))
                yield from _read(file, named, report)
    if not report.documents:
        left_out = str(report).partition("; ")[2]
        raise UserError(f"there is no text in {_few(names)}" + (f"; {left_out}" if left_out else ""))


def standard_library() -> list[Path]:
    """The Python standard library's own sources but for NOT_SOURCES, always in the same order.

    Raises UserError when this Python comes without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for directory, below, files in os.walk(root):
        below[:] = [name for name in below if name not in NOT_SOURCES and not name.startswith((".", "config-"))]
        found += [Path(directory, name) for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")]
    found = [path for path in found if path.relative_to(root).as_posix() not in NOT_SOURCES]
    if not found:
        raise UserError(f"this Python has no sources of its standard library in {root}: give files or directories of your own")
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _files(name: str, report: CorpusReport) -> Iterator[tuple[Path, bool]]:
    """The files that a path stands for, each with whether it was named (rather than found in a directory)."""
    if os.path.exists(name):
        matches = [name]
    elif glob.has_magic(name):
        matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise UserError(f"{name} matches no file")
    else:
        raise UserError(f"{name} does not exist")
    for path in map(Path, matches):
        if path.is_dir():
            yield from ((file, False) for file in _walk(path, report))
        else:
            yield path, True


def _walk(root: Path, report: CorpusReport) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read: {error.strerror or error}") from error

    for directory, below, files in os.walk(root, onerror=refuse):
        below[:] = sorted(name for name in below if not name.startswith(".") and name != "__pycache__")
        for file in sorted(Path(directory, name) for name in files if not name.startswith(".")):
            if unpacked_suffix(file) not in TEXT_SUFFIXES:
                report.skip("not text by name", str(file))
            elif not file.is_file():
                report.skip("not a regular file", str(file))
            else:
                yield file


class _NotTextError(Exception):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _read(file: Path, named: bool, report: CorpusReport) -> Iterator[Document]:
    if not file.is_file():
        raise UserError(f"{file} is not a regular file")
    begun = False
    try:
        for document in _json_lines(file, report) if unpacked_suffix(file) == ".jsonl" else _text(file):
            report.files += not begun
            begun = True
            report.documents += not document.continues
            report.bytes += len(document.text.encode())
            yield document
    except _NotTextError as error:
        # Parts that were handed out already cannot be taken back.
        if named or begun:
            raise UserError(str(error)) from error
        report.skip(error.reason, str(file))
    else:
        if not begun:
            report.skip("empty", str(file))


def _text(file: Path) -> Iterator[Document]:
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    held: list[str] = []
    size = position = 0
    continues = False
    for chunk in chunks(file):
        if (zero := chunk.find(0)) >= 0:
            raise _NotTextError("binary", f"{file} is not text: there is a zero byte at offset {position + zero:,}")
        text = _decoded(decoder, chunk, position, file)
        held.append(text if position else text.removeprefix("\ufeff"))
        size += len(held[-1])
        position += len(chunk)
        if size > PART:
            part, rest = _cut("".join(held))
            yield Document(part, str(file), continues)
            held, size, continues = [rest], len(rest), True
    held.append(_decoded(decoder, b"", position, file, final=True))
    if any(held):
        yield Document("".join(held), str(file), continues)


def _decoded(decoder: codecs.IncrementalDecoder, chunk: bytes, position: int, file: Path, final: bool = False) -> str:
    """The text of `chunk`, which begins at byte `position` of the file."""
    begun = len(decoder.getstate()[0])
    try:
        return decoder.decode(chunk, final)
    except UnicodeDecodeError as error:
        byte, offset = error.object[error.start], position - begun + error.start
        raise _NotTextError("not UTF-8", f"{file} is not UTF-8 text: byte 0x{byte:02x} at offset {offset:,}") from error


def _cut(text: str) -> tuple[str, str]:
    """`text` cut near its end, where a line ends if there is such a place."""
    ends = [found.end() for found in _PART_END.finditer(text, max(len(text) - READ, 0))]
    at = ends[-1] if ends else len(text)
    return text[:at], text[at:]


def _json_lines(file: Path, report: CorpusReport) -> Iterator[Document]:
    for number, line in enumerate(lines(file), 1):
        if not line.strip():
            continue
        place = f"{file}, line {number:,}"
        text = _text_of(line, place, "utf-8-sig" if number == 1 else "utf-8")
        if text:
            yield Document(text, f"{file}:{number}")
        else:
            report.skip("empty texts", place)


def _text_of(line: bytes, place: str, encoding: str) -> str:
    try:
        content = json.loads(line.decode(encoding))
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(f"{place} is not UTF-8: byte 0x{byte:02x} at offset {error.start:,} of the line") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f'{place} holds no JSON object but {type(content).__name__}: each line must be like {{"text": "…"}}')
    if "text" not in content:
        keys = ", ".join(map(repr, list(content)[:5])) or "nothing"
        raise UserError(f'{place} has no "text", only {keys}')
    text = content["text"]
    if not isinstance(text, str):
        raise UserError(f'{place}: "text" is {type(text).__name__}, not a string')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f'{place}: character {error.start:,} of "text" is half of a surrogate pair, no Unicode text') from error
    return text


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
