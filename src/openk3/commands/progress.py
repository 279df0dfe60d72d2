"""A progress bar over bytes, for verbs that read or write whole checkpoints."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bytes_progress(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None] | None]:
    """Yields a function that hears bytes done and bytes in all; None when `quiet` or when stderr is not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def hear(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield hear
