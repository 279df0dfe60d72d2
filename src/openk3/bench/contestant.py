"""What a benchmark times: a piece of work that was built and warmed up in a process of its own."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class PeerMissing(ImportError):
    """A peer is not installed, or is another version than the one we compare with. The message names it."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """`run` does the work once. `facts` are plain values about it that JSON can hold (parameters, FLOPs, the backend that ran, …).

    `run` may return seconds by name, for parts of the work that the contestant timed itself.
    """

    run: Callable[[], dict[str, float] | None]
    version: str
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Spec:
    """How a worker process builds a contestant: `builder` ("module:function") called with `arguments`, which JSON can hold."""

    builder: str
    arguments: dict[str, Any] = field(default_factory=dict)


def require(distribution: str, version: str) -> str:
    """The installed version of a peer. Raises PeerMissing when it is not there, or when its version does not begin with `version`."""
    try:
        found = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        raise PeerMissing(f"{distribution} {version}".strip()) from None
    if version and found != version and not found.startswith(f"{version}."):
        raise PeerMissing(f"{distribution} {version} (version {found} is there)")
    return found
