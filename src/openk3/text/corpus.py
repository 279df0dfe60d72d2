"""Documents from files and directories, one at a time.

- A file that is named is read as text, whatever it is called; `.gz` and `.zst` are unpacked. Text is UTF-8 (a byte order mark is dropped).
- `.jsonl` (also packed) holds one JSON object a line, with the document under "text".
- A directory is searched, in order of names, for the files whose names say that they are text (`TEXT_SUFFIXES`); what begins with a dot, and
  `__pycache__`, is left out. A file in it that is empty, binary or not UTF-8 is left out too, and counted. The same in a named file is an error.
- `*`, `?` and `[…]` in a path that does not exist make it a pattern; the files it matches count as named.
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
"""What is read from a directory, `.gz` and `.zst` aside. JSON, CSV, HTML and the like are data rather than text: name such a file to read it."""

PART = 1 << 23
"""Characters. A longer document comes in parts, so that no file need fit into memory."""

_PART_END = re.compile(r"\n(?=\S)")


@dataclass(frozen=True)
class Document:
    """One text."""

    text: str
    source: str
    """The file, and the line of a .jsonl."""
    continues: bool = False
    """This is a further part of the document before it."""


@dataclass
class CorpusReport:
    """What was read, filled in while reading."""

    documents: int = 0
    bytes: int = 0
    """Of text, in UTF-8."""
    files: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Files and lines left out, by reason."""
    examples: dict[str, str] = field(default_factory=dict)
    """For each reason the first that was left out."""

    def skip(self, reason: str, source: str) -> None:
        """Count something that is left out."""
        self.skipped[reason] += 1
        self.examples.setdefault(reason, source)

    def __str__(self) -> str:
        """One line."""
        text = f"{self.documents:,} documents, {self.bytes:,} bytes of text from {self.files:,} files"
        if self.skipped:
            text += "; left out: " + ", ".join(
                f"{count:,} {reason} ({'' if count == 1 else 'first: '}{self.examples[reason]})" for reason, count in self.skipped.items()
            )
        return text


def read_documents(paths: Iterable[str | os.PathLike[str]], report: CorpusReport | None = None) -> Iterator[Document]:
    """The documents in `paths`, in the order given; a file that comes twice is read once.

    Raises UserError, naming the place, for what cannot be read, and at the end when there was no text at all.
    """
    report = CorpusReport() if report is None else report
    seen: set[tuple[int, int]] = set()
    names = [os.fspath(path) for path in paths]
    if not names:
        raise UserError("no text was named: give files or directories")
    for name in names:
        for file, named in _files(name, report):
            try:
                status = file.stat()
            except OSError as error:
                raise UserError(f"{file} cannot be read: {error.strerror or error}") from error
            if (status.st_dev, status.st_ino) in seen:
                report.skip("given twice", str(file))
                continue
            seen.add((status.st_dev, status.st_ino))
            yield from _read(file, named, report)
    if not report.documents:
        raise UserError(f"there is no text in {_few(names)}" + (f" ({report})" if report.skipped else ""))


def standard_library() -> list[Path]:
    """The Python standard library's own sources, without its tests, its tables that were generated, and what was installed into it.

    Raises UserError when this Python comes without sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages", "lib2to3", "encodings", "pydoc_data", "__phello__", "__pycache__"}
    found = []
    for directory, below, files in os.walk(root):
        below[:] = sorted(name for name in below if name not in left_out and not name.startswith((".", "config-")))
        found += [Path(directory, name) for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")]
    if not found:
        raise UserError(f"this Python has no sources of its standard library in {root}")
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _files(name: str, report: CorpusReport) -> Iterator[tuple[Path, bool]]:
    """The files that a path stands for, each with whether it was named (rather than found in a directory)."""
    path = Path(name)
    if path.is_dir():
        yield from ((file, False) for file in _walk(path, report))
    elif path.exists():
        yield path, True
    elif glob.has_magic(name):
        matches = sorted(glob.glob(name, recursive=True))
        if not matches:
            raise UserError(f"{name} matches no file")
        for match in map(Path, matches):
            yield from ((file, False) for file in _walk(match, report)) if match.is_dir() else [(match, True)]
    else:
        raise UserError(f"{name} does not exist")


def _walk(root: Path, report: CorpusReport) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"{error.filename} cannot be read: {error.strerror or error}") from error

    for directory, below, files in os.walk(root, onerror=refuse):
        below[:] = sorted(name for name in below if not name.startswith(".") and name != "__pycache__")
        for file in sorted(Path(directory, name) for name in files if not name.startswith(".")):
            if unpacked_suffix(file) not in TEXT_SUFFIXES:
                report.skip("not text by name", str(file))
            elif not file.is_file():
                report.skip("no regular file", str(file))
            else:
                yield file


def _read(file: Path, named: bool, report: CorpusReport) -> Iterator[Document]:
    if not file.is_file():
        raise UserError(f"{file} is not a regular file")
    documents = _json_lines(file, report) if unpacked_suffix(file) == ".jsonl" else _text(file)
    before = report.documents
    bytes_before = report.bytes
    try:
        for document in documents:
            report.documents += not document.continues
            report.bytes += len(document.text.encode())
            yield document
    except _NotTextError as error:
        if named or report.bytes > bytes_before:
            raise UserError(str(error)) from error
        report.skip(error.reason, str(file))
        return
    report.files += report.documents > before
    if report.documents == before:
        report.skip("empty", str(file))


class _NotTextError(Exception):
    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def _text(file: Path) -> Iterator[Document]:
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    held: list[str] = []
    size = position = 0
    continues = False
    for chunk in _with_end(chunks(file)):
        nul = -1 if chunk is None else chunk.find(0)
        if chunk is not None and nul >= 0:
            raise _NotTextError("binary", f"{file} is not text: there is a zero byte at offset {position + nul:,}")
        try:
            pending = len(decoder.getstate()[0])
            text = decoder.decode(chunk or b"", final=chunk is None)
        except UnicodeDecodeError as error:
            offset = position - pending + error.start
            raise _NotTextError("not UTF-8", f"{file} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset {offset:,}") from error
        if position == 0:
            text = text.removeprefix("\ufeff")
        position += len(chunk or b"")
        held.append(text)
        size += len(text)
        if size > PART and chunk is not None:
            part, rest = _cut("".join(held))
            yield Document(part, str(file), continues)
            held, size, continues = [rest], len(rest), True
    if size:
        yield Document("".join(held), str(file), continues)


def _with_end(source: Iterator[bytes]) -> Iterator[bytes | None]:
    yield from source
    yield None


def _cut(text: str) -> tuple[str, str]:
    """`text` cut near its end, where a line ends if there is such a place."""
    end = None
    for end in _PART_END.finditer(text, max(len(text) - READ, 0)):
        pass
    at = end.end() if end else len(text)
    return text[:at], text[at:]


def _json_lines(file: Path, report: CorpusReport) -> Iterator[Document]:
    for number, line in enumerate(lines(file), 1):
        place = f"{file}, line {number:,}"
        if not line.strip():
            continue
        try:
            content = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise UserError(f"{place} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start:,} of the line") from error
        except (ValueError, RecursionError) as error:
            raise UserError(f"{place} is not JSON: {error}") from error
        if not isinstance(content, dict):
            raise UserError(f"{place} is not a JSON object but {type(content).__name__}")
        if "text" not in content:
            keys = ", ".join(map(repr, list(content)[:5])) or "no keys"
            raise UserError(f'{place} has no "text" (it has {keys})')
        text = content["text"]
        if not isinstance(text, str):
            raise UserError(f'{place}: "text" is {type(text).__name__}, not a string')
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f'{place}: "text" holds half a surrogate pair ({ascii(text[error.start])}) at character {error.start:,}') from error
        if not text:
            report.skip("empty lines", place)
            continue
        yield Document(text, f"{file}:{number}")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
