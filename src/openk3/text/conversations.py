"""Conversations to learn from: JSONL in the OpenAI messages shape, in the release's chat format, with a mark on the assistant's part.

Each line holds an object: `messages`, and if wanted `tools` and `thinking` (default true: the assistant has a think channel).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openk3.errors import UserError
from openk3.text.corpus import CorpusReport
from openk3.text.packed_files import lines
from openk3.text.tokenizer import Tokenizer
from openk3.text.xtml import CONTROL_TOKENS, pieces

KEYS = ("messages", "tools", "thinking")


@dataclass(frozen=True)
class Conversation:
    """One conversation and where it was read."""

    messages: Sequence[Mapping[str, Any]]
    source: str
    tools: Sequence[Mapping[str, Any]] | None = None
    thinking: bool = True

    def encode(self, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
        """Its ids, and for each whether the assistant wrote it.

        Raises UserError, naming the place, for messages of the wrong shape, and for a tokenizer without the format's control tokens.
        """
        missing = [name for name in CONTROL_TOKENS if name not in tokenizer.special_ids]
        if missing:
            raise UserError(f"the tokenizer has no control token {missing[0]}: it cannot hold conversations")
        try:
            rendered = pieces(self.messages, tools=self.tools, thinking=self.thinking, add_generation_prompt=False)
        except UserError as error:
            raise UserError(f"{self.source}: {error}") from None
        ids: list[int] = []
        learned: list[bool] = []
        for piece in rendered:
            part = tokenizer.encode(piece.text, allow_special=piece.special)
            ids += part
            learned += [piece.learned] * len(part)
        return ids, learned


def read_conversations(paths: Iterable[str], report: CorpusReport | None = None) -> Iterator[Conversation]:
    """The conversations in JSONL files (also `.gz`, `.zst`), in order; empty lines are passed over.

    Raises UserError, naming file and line, for what is not a conversation with something to learn in it, and when there was none.
    """
    report = CorpusReport() if report is None else report
    names = list(paths)
    for name in names:
        file = Path(name)
        if not file.is_file():
            raise UserError(f"{file} does not exist" if not file.exists() else f"{file} is not a file: give .jsonl files of conversations")
        report.files += 1
        for number, line in enumerate(lines(file), 1):
            if not line.strip():
                continue
            conversation = _parse(line, f"{file}, line {number:,}")
            report.documents += 1
            report.bytes += len(line)
            yield conversation
    if not report.documents:
        raise UserError(f"there is no conversation in {', '.join(names) or 'no file at all'}")


def _parse(line: bytes, place: str) -> Conversation:
    try:
        content = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start:,} of the line") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f'{place} holds no JSON object but {type(content).__name__}: each line must be like {{"messages": […]}}')
    unknown = sorted(set(content) - set(KEYS))
    if unknown:
        raise UserError(f"{place}: a conversation has no key {unknown[0]!r}; it has {', '.join(KEYS)}")
    messages, tools, thinking = content.get("messages"), content.get("tools"), content.get("thinking", True)
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{place}: "messages" must be a list with something in it')
    if not (tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools))):
        raise UserError(f'{place}: "tools" must be a list of objects')
    if not isinstance(thinking, bool):
        raise UserError(f'{place}: "thinking" must be true or false')
    conversation = Conversation(messages, place, tools, thinking)
    try:
        pieces(messages, tools=tools, thinking=thinking)
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    _check_worth(messages, place)
    return conversation


def _check_worth(messages: Sequence[Mapping[str, Any]], place: str) -> None:
    """The renderer takes empty messages; to learn from them is a mistake in the data."""
    for position, message in enumerate(messages):
        if not message.get("content") and not message.get("tool_calls") and not message.get("tools"):
            raise UserError(f"{place}: message {position} ({message['role']}) has empty content")
    if not any(message["role"] == "assistant" for message in messages):
        raise UserError(f"{place}: no message is the assistant's, so there is nothing to learn")
