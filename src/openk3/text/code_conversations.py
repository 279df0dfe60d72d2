"""Conversations made from Python sources: the signature and docstring of a function are asked, its body is the answer."""

from __future__ import annotations

import ast
import json
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from openk3.errors import UserError
from openk3.text.files import atomic_writer

LONGEST_QUESTION, LONGEST_ANSWER = 400, 500
"""Characters; longer functions are passed over."""


def conversations(files: Iterable[Path]) -> Iterator[dict[str, Any]]:
    """One conversation for each documented function of `files` that is short enough, in order. What does not parse is passed over."""
    for file in files:
        try:
            source = file.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (OSError, ValueError, SyntaxError, RecursionError):
            continue
        lines = source.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                pair = _pair(node, lines)
                if pair is not None:
                    yield {
                        "messages": [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}],
                        "thinking": False,
                    }


def write_conversations(files: Iterable[Path], path: str | Path) -> int:
    """Write them to a JSONL file, whole or not at all; returns how many. Raises UserError when there is none."""
    count = 0
    with atomic_writer(path) as out:
        for conversation in conversations(files):
            out.write(json.dumps(conversation, ensure_ascii=False).encode() + b"\n")
            count += 1
        if not count:
            raise UserError("the sources hold no documented function that is short enough to make a conversation of")
    return count


def _pair(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> tuple[str, str] | None:
    """(signature with docstring, body), both without the indentation that the function stands in."""
    if ast.get_docstring(node) is None or len(node.body) < 2:
        return None
    docstring, rest = node.body[0], node.body[1:]
    if docstring.end_lineno is None or rest[-1].end_lineno is None or rest[0].lineno <= docstring.end_lineno:
        return None
    question = textwrap.dedent("\n".join(lines[node.lineno - 1 : docstring.end_lineno]))
    body = "\n".join(lines[docstring.end_lineno : rest[-1].end_lineno])
    # The answer keeps the one level of indentation that makes it a body.
    answer = textwrap.indent(textwrap.dedent(body), "    ").strip("\n")
    if not answer.strip() or len(question) > LONGEST_QUESTION or len(answer) > LONGEST_ANSWER:
        return None
    return question, answer
