"""Tokens of many documents in one file, memory-mapped: what training reads.

Layout, little-endian: a header of 4096 bytes (JSON, padded with spaces); the tokens (uint16, or uint32 for large vocabularies); then, each
at a multiple of 8 bytes, the documents' offsets (int64, one more than there are documents), a hash of each document's tokens (uint64),
for each id of the vocabulary the bytes of text it stands for (uint32), and where only some tokens are to be learned a byte for each
token, 1 if it is.

A document is stored between its beginning-of-text and its end-of-text token, where the tokenizer has them: from the first a model can
begin a text, the second is how it learns to stop. A conversation is stored as it is rendered.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openk3.errors import UserError
from openk3.text.corpus import Document
from openk3.text.files import atomic_writer
from openk3.text.tokenizer import Tokenizer

FORMAT = "openk3 tokens"
VERSION = 1
HEADER_BYTES = 4096

Ints = NDArray[np.int64]

_GROUP = 1 << 21
"""Characters that are encoded at once."""


@dataclass(frozen=True, eq=False)
class Part:
    """Some of a file's documents, or a stretch of one.

    Range r is tokens[starts[r] : ends[r]], at least two tokens; each but its first is to be predicted from those before it.
    """

    file: TokenFile
    name: str
    starts: Ints
    ends: Ints

    @cached_property
    def predictions(self) -> int:
        """The number of tokens to be predicted: every token of the ranges but the first of each."""
        return int((self.ends - self.starts - 1).sum())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of which tokens these are."""
        digest = hashlib.sha256(self.file.fingerprint.encode())
        for array in (self.starts, self.ends):
            digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class TokenFile:
    """An open file of tokens."""

    path: Path
    header: dict[str, Any]
    tokens: NDArray[np.uint16] | NDArray[np.uint32]
    offsets: Ints
    hashes: NDArray[np.uint64]
    text_lengths: NDArray[np.uint32]
    learned: NDArray[np.uint8] | None = None
    """For each token whether it is to be predicted; None: all are."""

    @staticmethod
    def write(path: str | Path, documents: Iterable[Sequence[int]], tokenizer: Tokenizer) -> TokenFile:
        """Write `documents`, each the ids of a text, whole or not at all; and open the file.

        Raises UserError when there is no document, when an id is outside the vocabulary, or when the file system refuses.
        """
        return TokenFile.write_parts(path, ([ids] for ids in documents), tokenizer)

    @staticmethod
    def write_parts(path: str | Path, documents: Iterable[Iterable[Sequence[int]]], tokenizer: Tokenizer) -> TokenFile:
        """`write`, with each document as an iterator over its parts, so that one need not be in memory whole."""
        begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        return TokenFile._write(path, (chain([begin], parts, [end]) for parts in documents), tokenizer, None)

    @staticmethod
    def write_marked(path: str | Path, documents: Iterable[tuple[Sequence[int], Sequence[bool]]], tokenizer: Tokenizer) -> TokenFile:
        """Write documents of which only the marked tokens are to be predicted, as they are: nothing begins or ends them.

        Raises UserError as `write` does.
        """
        marks = bytearray()

        def ids() -> Iterator[list[Sequence[int]]]:
            for tokens, learned in documents:
                marks.extend(learned)
                yield [tokens]

        return TokenFile._write(path, ids(), tokenizer, marks)

    @staticmethod
    def _write(path: str | Path, documents: Iterable[Iterable[Sequence[int]]], tokenizer: Tokenizer, marks: bytearray | None) -> TokenFile:
        """`marks` fills up while `documents` is read."""
        dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        offsets, hashes = [0], []
        content = hashlib.sha256()
        with atomic_writer(path) as file:
            file.write(b" " * HEADER_BYTES)
            for parts in documents:
                digest = hashlib.blake2b(digest_size=8)
                length = 0
                for ids in parts:
                    data = _checked(ids, tokenizer.vocab_size).astype(dtype).tobytes()
                    file.write(data)
                    content.update(data)
                    digest.update(data)
                    length += len(ids)
                offsets.append(offsets[-1] + length)
                hashes.append(int.from_bytes(digest.digest(), "little"))
            if not offsets[-1]:
                raise UserError("there is no document to write")
            arrays: list[NDArray[Any]] = [np.array(offsets, "<i8"), np.array(hashes, "<u8"), np.array(tokenizer.text_lengths, "<u4")]
            if marks is not None:
                arrays.append(np.frombuffer(marks, np.uint8))
            for array in arrays:
                file.write(bytes(-file.tell() % 8))
                file.write(array.tobytes())
                content.update(array.tobytes())
            header = {
                "format": FORMAT,
                "version": VERSION,
                "dtype": dtype.name,
                "tokens": offsets[-1],
                "documents": len(hashes),
                "vocab_size": tokenizer.vocab_size,
                "tokenizer": tokenizer.fingerprint,
                "sha256": content.hexdigest(),
                "marked": marks is not None,
            }
            file.seek(0)
            file.write(json.dumps(header).encode().ljust(HEADER_BYTES))
        return TokenFile.open(path)

    @staticmethod
    def open(path: str | Path, tokenizer: Tokenizer | None = None) -> TokenFile:
        """Map a file into memory. Raises UserError when it is missing, cut off or damaged, or was not written with `tokenizer`."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                header = _header(file.read(HEADER_BYTES), path)
                size = file.seek(0, 2)
            places = _places(header)
            if size != places[-1]:
                raise UserError(f"{path} is damaged: it has {size:,} bytes, its header says {places[-1]:,}; write it anew")
            mapped = np.asarray(np.memmap(path, np.uint8, "r"))
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
        if tokenizer is not None and header["tokenizer"] != tokenizer.fingerprint:
            theirs, ours = header["tokenizer"][:12], tokenizer.fingerprint[:12]
            raise UserError(f"{path} was written with another tokenizer (fingerprint {theirs}…, not {ours}…)")

        def section(n: int, count: int, dtype: str) -> Any:
            kind = np.dtype(dtype)
            return mapped[places[n] : places[n] + count * kind.itemsize].view(kind)

        documents = header["documents"]
        tokens = section(0, header["tokens"], "<u2" if header["dtype"] == "uint16" else "<u4")
        offsets = section(1, documents + 1, "<i8").astype(np.int64)
        if offsets[0] != 0 or offsets[-1] != len(tokens) or (np.diff(offsets) < 0).any():
            raise UserError(f"{path} is damaged: its documents' offsets do not fit its tokens; write it anew")
        learned = section(4, header["tokens"], "u1") if header.get("marked") else None
        return TokenFile(path, header, tokens, offsets, section(2, documents, "<u8"), section(3, header["vocab_size"], "<u4"), learned)

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.hashes)

    @property
    def vocab_size(self) -> int:
        """Ids are below this."""
        return int(self.header["vocab_size"])

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of the content, as written into the header."""
        return str(self.header["sha256"])

    def document(self, index: int) -> NDArray[np.uint16] | NDArray[np.uint32]:
        """The tokens of one document, with those that begin and end it."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def verify(self) -> None:
        """Read all of it. Raises UserError unless it is what was written."""
        content = hashlib.sha256()
        for start in range(0, len(self.tokens), 1 << 24):
            content.update(self.tokens[start : start + (1 << 24)].tobytes())
        arrays: list[NDArray[Any]] = [self.offsets, self.hashes, self.text_lengths]
        for array in arrays if self.learned is None else [*arrays, self.learned]:
            content.update(array.tobytes())
        if content.hexdigest() != self.fingerprint:
            raise UserError(f"{self.path} is damaged: its content is not what was written; write it anew")

    def whole(self) -> Part:
        """All documents."""
        return self._part("all", self.offsets[:-1], self.offsets[1:])

    def split(self, heldout_fraction: float | None = None, *, heldout_tokens: int | None = None) -> tuple[Part, Part]:
        """(train, held out): about that share of the tokens, or that many, and never more, is held out. Give one of the two.

        Whole documents in the order of their hashes, as they fit: the choice depends on the texts alone, and copies of a text stay
        together. Where they do not make up half of what is asked for, because the others are too long, the end of one of those is held
        out too.
        Raises UserError when there is too little text for two parts.
        """
        if (heldout_fraction is None) == (heldout_tokens is None):
            raise ValueError("give heldout_fraction or heldout_tokens")
        if heldout_fraction is not None and not 0 < heldout_fraction < 1:
            raise UserError(f"the held-out share is {heldout_fraction}: it must be above 0 and below 1")
        total = len(self.tokens)
        budget = math.ceil(total * heldout_fraction) if heldout_fraction is not None else int(heldout_tokens or 0)
        if not 2 <= budget <= total - 2:
            raise UserError(f"{self.path} has {total:,} tokens, of which {budget:,} cannot be held out: give more text or another share")
        lengths = np.diff(self.offsets)
        order = np.argsort(self.hashes, kind="stable")
        _, firsts, copies = np.unique(self.hashes[order], return_index=True, return_counts=True)
        sizes = lengths[order[firsts]] * copies
        chosen = np.zeros(self.documents, bool)
        taken = 0
        for first, count, size in zip(firsts.tolist(), copies.tolist(), sizes.tolist(), strict=True):
            if taken + size <= budget:
                chosen[order[first : first + count]] = True
                taken += size
        starts, ends = self.offsets[:-1], self.offsets[1:].copy()
        heldout_starts, heldout_ends = starts[chosen], ends[chosen]
        rest = budget - taken
        single = order[firsts[copies == 1]]
        single = single[~chosen[single] & (lengths[single] >= rest + 2)]
        if taken < budget / 2 and len(single):
            document = single[0]
            # The first token of the end is predicted too, from the last one of what stays.
            heldout_starts = np.append(heldout_starts, ends[document] - rest - 1)
            heldout_ends = np.append(heldout_ends, ends[document])
            ends[document] -= rest
        parts = self._part("train", starts[~chosen], ends[~chosen]), self._part("heldout", heldout_starts, heldout_ends)
        if not all(part.predictions for part in parts):
            raise UserError(
                f"{self.path} cannot be divided: it has {_count(self.documents, 'document')}, {len(firsts):,} of them different, and "
                f"{budget:,} of its {total:,} tokens are to be held out: give more text or another share"
            )
        return parts

    def _part(self, name: str, starts: Ints, ends: Ints) -> Part:
        useful = ends - starts >= 2
        return Part(self, name, starts[useful], ends[useful])


def encode_corpus(documents: Iterable[Document], tokenizer: Tokenizer, path: str | Path) -> TokenFile:
    """Encode `documents` and write them to `path`, a few megabytes of text at a time. Raises UserError as `TokenFile.write` does."""
    return TokenFile.write_parts(path, _joined(_encoded(documents, tokenizer)), tokenizer)


def _encoded(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[bool, list[int]]]:
    """For each document whether it continues the one before, and its ids."""
    group: list[Document] = []
    size = 0
    for document in chain(documents, [None]):
        if document is not None:
            group.append(document)
            size += len(document.text)
        if document is None or size >= _GROUP:
            yield from zip([one.continues for one in group], tokenizer.encode_batch([one.text for one in group]), strict=True)
            group, size = [], 0


def _joined(parts: Iterator[tuple[bool, list[int]]]) -> Iterator[Iterator[list[int]]]:
    """Each document as an iterator over its parts. One must be read to its end before the next is asked for."""
    following = next(parts, None)

    def document() -> Iterator[list[int]]:
        nonlocal following
        assert following is not None
        yield following[1]
        while (following := next(parts, None)) and following[0]:
            yield following[1]

    while following is not None:
        yield document()


def _checked(ids: Sequence[int], vocab_size: int) -> Ints:
    array = np.asarray(ids, np.int64)
    wrong = array[(array < 0) | (array >= vocab_size)]
    if len(wrong):
        raise UserError(f"a document holds the token id {wrong[0]}, outside the vocabulary of {vocab_size:,}")
    return array


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def _header(data: bytes, path: Path) -> dict[str, Any]:
    try:
        header = json.loads(data)
        good = header["format"] == FORMAT and isinstance(header["version"], int)
    except (ValueError, TypeError, KeyError):
        good = False
    if not good:
        raise UserError(f"{path} is not a file of tokens, or its header is damaged; write it anew")
    if header["version"] != VERSION:
        raise UserError(f"{path} has version {header['version']} of its format; this program reads version {VERSION}: write it anew")
    counts = [header.get(name) for name in ("tokens", "documents", "vocab_size")]
    strings = [header.get(name) for name in ("tokenizer", "sha256")]
    if (
        header.get("dtype") not in ("uint16", "uint32")
        or not all(type(count) is int and 0 < count < 1 << 48 for count in counts)
        or not all(isinstance(string, str) for string in strings)
    ):
        raise UserError(f"{path} is damaged: its header is not complete; write it anew")
    return header


def _places(header: dict[str, Any]) -> list[int]:
    """Where each section begins, and the size of the file."""
    sizes = [header["tokens"] * (2 if header["dtype"] == "uint16" else 4)]
    sizes += [(header["documents"] + 1) * 8, header["documents"] * 8, header["vocab_size"] * 4]
    if header.get("marked"):
        sizes.append(header["tokens"])
    places = [HEADER_BYTES]
    for n, size in enumerate(sizes):
        end = places[-1] + size
        places.append(end + (-end % 8 if n < len(sizes) - 1 else 0))
    return places
