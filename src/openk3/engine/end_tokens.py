"""Which tokens end a text. Checkpoints state it in up to three files, which do not always agree; generation stops at any of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openk3.errors import UserError


@dataclass(frozen=True)
class EndTokens:
    """The end-of-text tokens of a checkpoint."""

    stated: Mapping[str, tuple[int, ...]]
    """For each file that states any, the ids it states, ascending."""

    @property
    def ids(self) -> frozenset[int]:
        """All of them: generation stops at each."""
        return frozenset(one for ids in self.stated.values() for one in ids)

    @property
    def disagreement(self) -> str | None:
        """One line that names who says what, or None when all files that state any say the same."""
        if len(set(self.stated.values())) < 2:
            return None
        says = ", ".join(f"{name} says {' and '.join(map(str, ids))}" for name, ids in self.stated.items())
        return f"the end-of-text tokens disagree: {says}; generation stops at any of them"


def end_tokens(checkpoint: Path, tokenizer: Path, special_ids: Mapping[str, int]) -> EndTokens:
    """The end tokens that `config.json` and `generation_config.json` of a checkpoint and `tokenizer_config.json` of its tokenizer state.

    `checkpoint`, `tokenizer`: directories (often the same). `special_ids`: the tokenizer's control tokens by text.
    Raises UserError for a file that cannot be read, or that names an end token which the tokenizer does not have.
    """
    stated: dict[str, tuple[int, ...]] = {}
    config = _read(checkpoint / "config.json")
    text_config = config.get("text_config")
    sources: list[tuple[str, object]] = [("config.json", config.get("eos_token_id"))]
    if isinstance(text_config, dict):
        sources.append(("config.json (text_config)", text_config.get("eos_token_id")))
    sources.append(("generation_config.json", _read(checkpoint / "generation_config.json").get("eos_token_id")))
    settings = _read(tokenizer / "tokenizer_config.json")
    sources.append(("tokenizer_config.json", _named_end(settings, tokenizer, special_ids)))
    for name, value in sources:
        ids = _ids(name, value)
        if ids:
            stated[name] = ids
    return EndTokens(stated)


def check_special_ids(tokenizer: Path, special_ids: Mapping[str, int]) -> None:
    """Raise UserError when `tokenizer_config.json` lists a control token under another id than the tokenizer gives it."""
    listed = _read(tokenizer / "tokenizer_config.json").get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    for key, entry in listed.items():
        content = _content(entry)
        known = special_ids.get(content) if content is not None else None
        if known is not None and str(known) != str(key):
            raise UserError(f"{tokenizer}: tokenizer_config.json says {content} is token {key}, the tokenizer says {known}")


def _named_end(settings: Mapping[str, Any], directory: Path, special_ids: Mapping[str, int]) -> object:
    content = _content(settings.get("eos_token"))
    if content is None:
        return settings.get("eos_token_id")
    if content not in special_ids:
        raise UserError(f"{directory}: tokenizer_config.json names the end token {content!r}, which the tokenizer does not have")
    return special_ids[content]


def _content(entry: object) -> str | None:
    """A token as tokenizer files write it: a string, or an object that holds the string."""
    if isinstance(entry, dict):
        entry = entry.get("content")
    return entry if isinstance(entry, str) else None


def _ids(name: str, value: object) -> tuple[int, ...]:
    values: Iterable[object] = value if isinstance(value, list) else () if value is None else (value,)
    ids = set()
    for one in values:
        if not isinstance(one, int) or isinstance(one, bool) or one < 0:
            raise UserError(f"{name}: eos_token_id is {value!r}; it must be a token id or a list of them")
        ids.add(one)
    return tuple(sorted(ids))


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty when the file does not exist."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object")
    return content
