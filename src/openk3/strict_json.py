"""JSON files that people give us, read without surprises: every way in which one can be wrong is a UserError that names the file."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from openk3.errors import UserError

# The release's config is 6 kB and its tokenizer files some tens of MB. Beyond these a file is something else, and reading on would only
# exhaust memory or the stack.
LARGEST_FILE = 256 * 2**20
_DEEPEST = 64


def is_directory(path: Path) -> bool:
    """Whether `path` is a directory; False for what cannot be looked at."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def load_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`.

    Raises UserError, naming the file and the place in it: missing or unreadable, too large, not UTF-8, not JSON, not an object, a key given
    twice, a number that is not finite, nested without end.
    """
    try:
        return _parse(path)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _parse(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        if size > LARGEST_FILE:
            raise UserError(f"{size} bytes are more than such a file can have")
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except FileNotFoundError:
        raise UserError("there is no such file") from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"byte {error.start} is not UTF-8 text") from None
    except RecursionError:
        raise UserError("nested too deeply") from None
    except json.JSONDecodeError as error:
        raise UserError(f"line {error.lineno}, column {error.colno} is not valid JSON: {error.msg}") from None
    except UserError:
        raise
    except ValueError as error:  # a number of thousands of digits, a NUL in the path
        raise UserError(str(error)) from None
    if not isinstance(value, dict):
        raise UserError(f"it must hold a JSON object, not {show(value)}")
    check_tree(value)
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise UserError(f"the key {key!r} is given twice in one object")
        result[key] = value
    return result


def show(value: Any) -> str:
    """`value` as JSON, short enough for a message."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def same(left: Any, right: Any) -> bool:
    """Equal as JSON values: `true` is not 1."""
    return bool(left == right) and isinstance(left, bool) == isinstance(right, bool)


def check_tree(value: Any, where: str = "", depth: int = 0) -> None:
    """Raise UserError for the first thing in a tree that a JSON file cannot hold: a key that is no string, NaN, nesting without end."""
    if depth > _DEEPEST:
        raise UserError(f"{where[:80]} is nested too deeply")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str) or not _encodable(key):
                raise UserError(f"the key {key!r}{f' in {where}' if where else ''} is not a string")
            check_tree(item, f"{where}.{key}" if where else key, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            check_tree(item, where, depth + 1)
    elif isinstance(value, str):
        if not _encodable(value):
            raise UserError(f"{where} holds half of a character (a lone surrogate), which no text file can")
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where} is {value}: it must be a finite number")
    elif value is not None and not isinstance(value, (bool, int, float)):
        raise UserError(f"{where} is of type {type(value).__name__}, which JSON does not have")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
