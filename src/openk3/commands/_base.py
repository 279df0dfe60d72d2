"""What every verb shares: a dataclass of arguments, read from the command line by tyro, whose complaints become one line."""

from __future__ import annotations

import contextlib
import io
import re
import textwrap
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from openk3.errors import UserError

Arguments = TypeVar("Arguments")

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r"[\u2500-\u257f]+")
_RULE = re.compile(r"[\u2500-\u257f\s]+")
_FIELD = re.compile(r"Error parsing (?!-)\S+: ")


def parse(
    arguments: type[Arguments],
    argv: Sequence[str],
    *,
    verb: str,
    description: str,
    examples: Sequence[str],
    default: Arguments | None = None,
    markers: Sequence[Any] = (),
) -> Arguments:
    """Read `argv` into the dataclass `arguments`.

    A field's docstring is its help; `Annotated[…, tyro.conf.Positional]` makes it positional. `default` gives the values that hold
    unless the command line says otherwise. `markers` are tyro's, for the whole of it.

    `--help` prints to stdout and raises SystemExit(0). What tyro rejects raises UserError with tyro's reason in one line.
    """
    text = "\n".join([textwrap.fill(description, 80, subsequent_indent="  "), "", "Examples:", *(f"    {example}" for example in examples)])
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(arguments, prog=f"openk3 {verb}", description=text, args=list(argv), config=tuple(markers), **defaults)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(f"{_reason(complaint.getvalue())}; see openk3 {verb} --help") from None


def _reason(box: str) -> str:
    """The reason within the box that tyro draws on a terminal: what stands between its title and its first rule."""
    lines = _ANSI.sub("", box).splitlines()
    body: list[str] = []
    for line in lines[1:]:
        if _RULE.fullmatch(line) and body:
            break
        body.append(_FRAME.sub(" ", line))
    return _FIELD.sub("", " ".join(" ".join(body or lines).split())).rstrip(".")
