"""A tree of dataclasses ↔ TOML, strictly: an unknown key, a wrong type or a missing value is a UserError that names the key and the file.

Understood field types: `bool`, `int`, `float`, `str`, `Literal[…]`, `tuple[str, …]`, `dict[str, Any]`, any of them `| None`, dataclasses.
TOML has no null: None is written by leaving the key out, so every field that may be None must have None as its default.
"""

from __future__ import annotations

import dataclasses
import tomllib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from openk3.config_rules import nearest
from openk3.errors import UserError

Tree = TypeVar("Tree")


def read_file(path: str | Path) -> dict[str, Any]:
    """The parsed TOML of the file `path`. Raises UserError when it cannot be read or is not TOML."""
    path = Path(path).expanduser()
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None
    except RecursionError:
        raise UserError(f"{path}: nested too deeply") from None


def parse_value(text: str) -> Any:
    """One TOML value, as in `0.1`, `[3, 5]`, `true` or `"situ"`; what is no TOML is the text itself."""
    try:
        parsed = tomllib.loads(f"value = {text}")
        return parsed["value"] if parsed.keys() == {"value"} else text
    except tomllib.TOMLDecodeError:
        return text


def build(kind: type[Tree], source: Mapping[str, Any], where: str, prefix: str = "") -> Tree:
    """An instance of the dataclass `kind` from the nested mapping `source`; absent keys keep their defaults.

    `where` (a file, the command line) and the dotted key stand in every message. Raises UserError.
    """
    hints = get_type_hints(kind, include_extras=False)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, value in source.items():
        if key not in names:
            raise UserError(f"{where}: {prefix}{key} is not a setting{nearest(key, names)}")
        values[key] = _convert(hints[key], value, where, prefix + key)
    try:
        return kind(**values)
    except UserError as error:
        message = str(error)
        raise UserError(message if message.startswith(f"{where}: ") else f"{where}: {message}") from None


def _convert(hint: Any, value: Any, where: str, name: str) -> Any:
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (option for option in get_args(hint) if option is not type(None))
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        if not isinstance(value, dict):
            raise UserError(f"{where}: {name} is {value!r}: it is a table, [{name}]")
        return build(hint, value, where, f"{name}.")
    if get_origin(hint) is Literal:
        options = get_args(hint)
        if value not in options or isinstance(value, bool):
            raise UserError(f"{where}: {name} is {value!r}: it must be one of {', '.join(map(str, options))}")
        return value
    if get_origin(hint) is tuple:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise UserError(f"{where}: {name} is {value!r}: it must be a list of strings")
        return tuple(value)
    if get_origin(hint) is dict:
        if not isinstance(value, dict):
            raise UserError(f"{where}: {name} is {value!r}: it is a table, [{name}]")
        return dict(value)
    return _scalar(hint, value, where, name)


def _scalar(hint: Any, value: Any, where: str, name: str) -> Any:
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[hint]
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"{where}: {name} is {value!r}: it must be {wanted}")
    return value


def dump(tree: Any) -> str:
    """`tree`, a dataclass, as TOML text that `build` reads back equal."""
    return "\n".join(_table(_plain(tree), "")).strip("\n") + "\n"


def _plain(tree: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        if value is not None:
            result[field.name] = _plain(value) if dataclasses.is_dataclass(value) else value
    return result


def _table(values: Mapping[str, Any], name: str) -> list[str]:
    lines = [f"{_key(key)} = {_value(value)}" for key, value in values.items() if not isinstance(value, Mapping)]
    if name and lines:
        lines = ["", f"[{name}]", *lines]
    for key, value in values.items():
        if isinstance(value, Mapping):
            lines += _table(value, f"{name}.{_key(key)}" if name else _key(key))
    return lines


def _key(key: str) -> str:
    plain = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if plain else _string(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)  # "1e-05", "inf" and "nan" are TOML as they stand
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    raise TypeError(f"TOML cannot hold a {type(value).__name__}")


def _string(text: str) -> str:
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r", "\b": "\\b", "\f": "\\f"}
    return '"' + "".join(escapes.get(c) or (f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c) for c in text) + '"'
