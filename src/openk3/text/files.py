"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from openk3.errors import UserError


@contextlib.contextmanager
def atomic_writer(path: str | Path) -> Iterator[IO[bytes]]:
    """A binary file that takes the place of `path` when the block ends, and leaves `path` as it was when the block raises.

    The bytes are on the disk before the name is. Missing parent directories are made.
    Raises UserError when the file system refuses (no space, no permission, …).
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_directory(path.parent)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def write_atomic(path: str | Path, content: bytes) -> None:
    """Write `content` to `path`, whole or not at all. Raises UserError when the file system refuses."""
    with atomic_writer(path) as file:
        file.write(content)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
