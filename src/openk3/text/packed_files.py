"""Bytes of files, unpacked on the way if they are packed (`.gz`, `.zst`), in chunks of bounded size."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

import zstandard

from openk3.errors import UserError

PACKED = (".gz", ".zst")

READ = 1 << 20
"""Bytes that are held at once, roughly."""

# A block of 128 KiB of zstd can come from 4 bytes, so little is given to the decompressor at a time.
_PACKED_READ = 1 << 13
_ZSTD_WINDOW = 1 << 31


def unpacked_suffix(file: Path) -> str:
    """The suffix in lower case, without `.gz` or `.zst`: `.jsonl` for `a.jsonl.gz`."""
    suffix = file.suffix.lower()
    return Path(file.stem).suffix.lower() if suffix in PACKED else suffix


def chunks(file: Path) -> Iterator[bytes]:
    """The bytes of `file`. Raises UserError when it cannot be read, or when what is packed is damaged or cut off."""
    suffix = file.suffix.lower()
    try:
        if suffix == ".zst":
            yield from _zstd(file)
        else:
            with gzip.open(file) if suffix == ".gz" else file.open("rb") as source:
                while chunk := source.read(READ):
                    yield chunk
    except (gzip.BadGzipFile, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise UserError(f"{file} is damaged or cut off: {error}") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error


def lines(file: Path) -> Iterator[bytes]:
    """The lines of `file`, without their ends. Raises UserError as `chunks` does."""
    held: list[bytes] = []
    for chunk in chunks(file):
        first, *others = chunk.split(b"\n")
        held.append(first)
        if others:
            yield b"".join(held)
            yield from others[:-1]
            held = [others[-1]]
    if any(held):
        yield b"".join(held)


def _zstd(file: Path) -> Iterator[bytes]:
    """Frame by frame: the library's own reader takes a file that is cut off for one that ends there."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    frame = None
    with file.open("rb") as source:
        while packed := source.read(_PACKED_READ):
            while packed:
                frame = frame or decompressor.decompressobj()
                if chunk := frame.decompress(packed):
                    yield chunk
                packed = b""
                if frame.eof:
                    packed, frame = frame.unused_data, None
    if frame is not None:
        raise zstandard.ZstdError("the last frame is not complete")
