"""Which form of an op runs: the one place where that is decided (rule 3 of the house).

Each op offers some of the forms `reference` (reads like the formula), `torch` (vectorised), `native` (C++ on CPUs) and `fla`
(flash-linear-attention on GPUs). By default the fastest form that exists for the tensor's device runs; `OPENK3_BACKEND`, or
`with use("reference"):` in code, asks for another. A form that an op does not have falls back to `torch`, and `chosen()` tells what ran.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from torch import Tensor

BACKENDS = ("reference", "torch", "native", "fla")
_FASTEST_FIRST = {"cpu": ("native", "torch", "reference"), "cuda": ("fla", "torch", "reference")}

_override: ContextVar[str | None] = ContextVar("openk3_backend", default=None)


def requested() -> str | None:
    """The backend asked for by `use` or by `OPENK3_BACKEND`; None when nothing was asked.

    Raises ValueError for a name that is not a backend.
    """
    name = _override.get() or os.environ.get("OPENK3_BACKEND") or None
    if name is not None and name not in BACKENDS:
        raise ValueError(f"OPENK3_BACKEND={name!r} is not a backend; choose one of {', '.join(BACKENDS)}")
    return name


@contextlib.contextmanager
def use(name: str) -> Iterator[None]:
    """Run every op inside the block with the backend `name`."""
    token = _override.set(name)
    try:
        requested()
        yield
    finally:
        _override.reset(token)


def chosen(forms: Mapping[str, Callable[..., Any]], x: Tensor) -> str:
    """The name of the form among `forms` that runs for tensors like `x`."""
    name = requested()
    if name is not None:
        return name if name in forms else "torch"
    order = _FASTEST_FIRST.get(x.device.type, ("torch", "reference"))
    return next(form for form in order if form in forms)


def pick(forms: Mapping[str, Callable[..., Any]], x: Tensor) -> Callable[..., Any]:
    """The form among `forms` that runs for tensors like `x`. `forms` always holds `torch` or `reference`."""
    return forms[chosen(forms, x)]
