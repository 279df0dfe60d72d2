"""Ctrl-C and termination as a wish to stop, which the loop grants after the step in progress."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_ASKED_BY = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Whether somebody asked the run to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """The signal that asked, or None."""

    def __bool__(self) -> bool:
        return self.signal is not None


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Within: the first SIGINT or SIGTERM is noted, and the second one has its usual effect at once.

    Outside the main thread signals cannot be caught, and the request never comes.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in _ASKED_BY}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _: FrameType | None) -> None:
        request.signal = number
        restore()

    for number in _ASKED_BY:
        signal.signal(number, note)
    try:
        yield request
    finally:
        restore()
