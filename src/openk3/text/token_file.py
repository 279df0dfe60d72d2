"""Tokens of many documents in one file, memory-mapped: what training reads.

Layout, little-endian: a header of 4096 bytes (JSON, padded with spaces), the tokens (uint16, or uint32 for large vocabularies), and, each at a
multiple of 8 bytes, the documents' offsets (int64, one more than documents), a hash of each document's tokens (uint64), and for each id of the
vocabulary the bytes of text it stands for (uint32).

Each document is stored with its beginning-of-text and end-of-text token, where the tokenizer has them: the first gives the first word something
to be predicted from, the second is what a model that stops has to learn.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

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


@dataclass(frozen=True)
class Part:
    """Some of a file's documents, or of a document's tokens.

    Range r is tokens[starts[r] : ends[r]]; it asks for `ends - starts - 1` predictions, each of a token from those before it.
    """

    file: TokenFile
    name: str
    starts: Ints
    ends: Ints

    @property
    def predictions(self) -> int:
        """The number of tokens to be predicted: every token of the ranges but the first of each."""
        return int((self.ends - self.starts - 1).sum())

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of which tokens these are."""
        digest = hashlib.sha256(self.file.fingerprint.encode())
        for array in (self.starts, self.ends):
            digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class TokenFile:
    """An open file of tokens."""

    path: Path
    header: dict[str, Any]
    tokens: NDArray[np.uint16] | NDArray[np.uint32]
    offsets: Ints
    hashes: NDArray[np.uint64]
    text_lengths: NDArray[np.uint32]

    @staticmethod
    def write(path: str | Path, documents: Iterable[Iterable[Sequence[int]]], tokenizer: Tokenizer) -> TokenFile:
        """Write `documents`, each given as its parts (lists of ids, without control tokens around them), whole or not at all; and open it.

        Raises UserError when there is no document, when an id is outside the vocabulary, or when the file system refuses.
        """
        dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        begin = np.array([] if tokenizer.bos_id is None else [tokenizer.bos_id], dtype)
        end = np.array([] if tokenizer.eos_id is None else [tokenizer.eos_id], dtype)
        offsets, hashes = [0], []
        content = hashlib.sha256()
        with atomic_writer(path) as file:
            file.write(b" " * HEADER_BYTES)
            for parts in documents:
                digest = hashlib.blake2b(digest_size=8)
                length = 0
                for ids in (begin, *(_checked(ids, tokenizer.vocab_size, dtype) for ids in parts), end):
                    data = ids.tobytes()
                    file.write(data)
                    content.update(data)
                    digest.update(data)
                    length += len(ids)
                offsets.append(offsets[-1] + length)
                hashes.append(int.from_bytes(digest.digest(), "little"))
            if not hashes:
                raise UserError("there is no document to write")
            for array in (np.array(offsets, "<i8"), np.array(hashes, "<u8"), np.array(tokenizer.text_lengths, "<u4")):
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
                "bos_id": tokenizer.bos_id,
                "eos_id": tokenizer.eos_id,
                "sha256": content.hexdigest(),
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
            whole = np.memmap(path, np.uint8, "r")
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
        if tokenizer is not None and header["tokenizer"] != tokenizer.fingerprint:
            raise UserError(f"{path} was written with another tokenizer (fingerprint {header['tokenizer'][:12]}, not {tokenizer.fingerprint[:12]})")
        documents, vocabulary = header["documents"], header["vocab_size"]

        def section(n: int, count: int, dtype: str) -> Any:
            kind = np.dtype(dtype)
            return whole[places[n] : places[n] + count * kind.itemsize].view(kind)

        tokens = section(0, header["tokens"], "<u2" if header["dtype"] == "uint16" else "<u4")
        offsets = np.array(section(1, documents + 1, "<i8"), np.int64)
        if offsets[0] != 0 or offsets[-1] != header["tokens"] or (np.diff(offsets) < 0).any():
            raise UserError(f"{path} is damaged: its documents' offsets do not fit its tokens; write it anew")
        return TokenFile(path, header, tokens, offsets, section(2, documents, "<u8"), section(3, vocabulary, "<u4"))

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
        for array in (self.offsets, self.hashes, self.text_lengths):
            content.update(array.tobytes())
        if content.hexdigest() != self.fingerprint:
            raise UserError(f"{self.path} is damaged: its content is not what was written; write it anew")

    def whole(self) -> Part:
        """All documents."""
        return self._part("all", self.offsets[:-1], self.offsets[1:])

    def split(self, heldout_fraction: float | None = None, heldout_tokens: int | None = None) -> tuple[Part, Part]:
        """(train, held out): at most that share of the tokens, or that many, is held out. Give one of the two.

        Whole documents, in the order of their hashes, as they fit: the choice depends on their content alone, and copies of a document
        stay together. When not one fits, the end of a document is held out.
        Raises UserError when there is too little text for two parts.
        """
        total = len(self.tokens)
        if (heldout_fraction is None) == (heldout_tokens is None):
            raise ValueError("give heldout_fraction or heldout_tokens")
        if heldout_fraction is not None and not 0 < heldout_fraction < 1:
            raise UserError(f"the held-out share is {heldout_fraction}: it must be above 0 and below 1")
        budget = math.ceil(total * heldout_fraction) if heldout_fraction is not None else int(heldout_tokens or 0)
        if not 2 <= budget <= total - 2:
            raise UserError(f"{self.path} has {total:,} tokens: {budget:,} of them cannot be held out; give more text or another share")
        lengths = np.diff(self.offsets)
        order = np.argsort(self.hashes, kind="stable")
        _, firsts, copies = np.unique(self.hashes[order], return_index=True, return_counts=True)
        sizes = lengths[order[firsts]] * copies
        chosen = np.zeros(self.documents, bool)
        taken = 0
        for first, count, size in zip(firsts.tolist(), copies.tolist(), sizes.tolist(), strict=True):
            if taken + size <= budget and size >= 2:
                chosen[order[first : first + count]] = True
                taken += size
        starts, ends = self.offsets[:-1], self.offsets[1:]
        if taken:
            return self._part("train", starts[~chosen], ends[~chosen]), self._part("heldout", starts[chosen], ends[chosen])
        single = order[firsts[copies == 1]]
        single = single[lengths[single] >= budget + 2]
        if not len(single):
            raise UserError(f"{self.path} cannot be divided: no document, and no end of one, makes {budget:,} tokens to hold out; give more text")
        document = single[0]
        cut = ends[document] - budget
        train_ends = ends.copy()
        train_ends[document] = cut
        # The first held-out token is predicted too, from the last one of the training part.
        return self._part("train", starts, train_ends), self._part("heldout", np.array([cut - 1]), np.array([ends[document]]))

    def _part(self, name: str, starts: Ints, ends: Ints) -> Part:
        useful = ends - starts >= 2
        return Part(self, name, starts[useful], ends[useful])


def encode_corpus(documents: Iterable[Document], tokenizer: Tokenizer, path: str | Path, *, batch_bytes: int = 1 << 22) -> TokenFile:
    """Encode `documents` and write them to `path`. A few megabytes of text are held at a time. Raises UserError as `TokenFile.write` does."""
    return TokenFile.write(path, _grouped(_encoded(documents, tokenizer, batch_bytes)), tokenizer)


def _encoded(documents: Iterable[Document], tokenizer: Tokenizer, batch_bytes: int) -> Iterator[tuple[bool, list[int]]]:
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= batch_bytes:
            yield from zip((one.continues for one in batch), tokenizer.encode_batch([one.text for one in batch]), strict=True)
            batch, size = [], 0
    yield from zip((one.continues for one in batch), tokenizer.encode_batch([one.text for one in batch]), strict=True)


def _grouped(parts: Iterator[tuple[bool, list[int]]]) -> Iterator[Iterator[list[int]]]:
    """Parts of a document together, without holding them."""
    pending = next(parts, None)

    def rest() -> Iterator[list[int]]:
        nonlocal pending
        assert pending is not None
        yield pending[1]
        for pending in parts:
            if not pending[0]:
                return
            yield pending[1]
        pending = None

    while pending is not None:
        yield rest()


def _checked(ids: Sequence[int], vocab_size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    array = np.asarray(ids, np.int64)
    if len(array) and not (0 <= array.min() and array.max() < vocab_size):
        raise UserError(f"a document holds token id {array.max() if array.min() >= 0 else array.min()}, outside the vocabulary of {vocab_size}")
    return array.astype(dtype)


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
    places = [HEADER_BYTES]
    for n, size in enumerate(sizes):
        end = places[-1] + size
        places.append(end + (-end % 8 if n < len(sizes) - 1 else 0))
    return places
