"""XTML, the chat format of the release (Kimi K3 report, appendix F): from messages to a prompt.

Messages have the OpenAI shape. A prompt is a list of pieces; only the template's own control tokens may become control tokens, so a
message cannot forge one however it is written. Wording and order are the release's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openk3.errors import UserError

OPEN, SEP, CLOSE, END_OF_MESSAGE = "<|open|>", "<|sep|>", "<|close|>", "<|end_of_msg|>"
CONTROL_TOKENS = (OPEN, SEP, CLOSE, END_OF_MESSAGE)
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"
ROLES = ("system", "user", "assistant", "tool")
EFFORTS = ("low", "high", "max")

_KEYS = {
    "system": {"role", "content", "name", "tools"},
    "user": {"role", "content", "name"},
    "assistant": {"role", "content", "name", "reasoning_content", "reasoning", "tool_calls"},
    "tool": {"role", "content", "name", "tool", "tool_call_id"},
}
_EFFORT_TEXT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), supported values "
    "include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)
_TOOLS_TEXT = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_MORE_TOOLS_TEXT = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\nYou have access to all existing and extended "
    "tools.\nHere are the specs for the extended tools.\n\n```json\n{}\n```"
)
_CHOICE_TEXT = "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message."
_FORMAT_TEXT = (
    "The system is invoked with `response_format={}`.\nYour response must be raw JSON data without markdown code blocks (```json) or any "
    "additional formatting."
)
_SCHEMA_TEXT = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


@dataclass(frozen=True)
class Piece:
    """A stretch of prompt that is tokenized on its own."""

    text: str
    special: bool
    """Whether control tokens may be recognised in it."""
    learned: bool = False
    """Whether the assistant writes it, so that fine-tuning learns it."""


def render(messages: Sequence[Mapping[str, Any]], **options: Any) -> list[tuple[str, bool]]:
    """The prompt as `(text, allow_special)` pieces. Options: see `pieces`."""
    return [(piece.text, piece.special) for piece in pieces(messages, **options)]


def pieces(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool = True,
    thinking_effort: str | None = None,
    tool_choice: str | None = None,
    response_format: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    image_prompts: Sequence[str] | None = None,
) -> list[Piece]:
    """The prompt with a mark on what the assistant wrote.

    `thinking` opens the think channel (off: channels of earlier turns are left out too); `thinking_effort` is low, high or max;
    `image_prompts` are the texts that stand for images, in order. Raises UserError naming the message and what is wrong with it.
    """
    if thinking_effort is not None and thinking_effort not in EFFORTS:
        raise UserError(f"thinking_effort {thinking_effort!r} is not supported; it is one of {', '.join(EFFORTS)}")
    images = _Images(image_prompts)
    out: list[Piece] = []
    if tools:
        out += _message({"role": "system", "type": "tool-declare"}, [Piece(_TOOLS_TEXT.format(_compact(tools)), False)])
    if thinking and thinking_effort is not None:
        out += _message({"role": "system", "type": "thinking-effort"}, [Piece(_EFFORT_TEXT.format(thinking_effort), False)])
    for position, message in _ordered(messages):
        out += _conversation(position, message, thinking, images)
    if tool_choice == "required":
        out += _message({"role": "system", "type": "tool-choice"}, [Piece(_CHOICE_TEXT, False)])
    elif tool_choice not in (None, "auto"):
        raise UserError(f"tool_choice {tool_choice!r} is not supported; it is auto or required")
    out += _response_format(response_format)
    images.finish()
    if add_generation_prompt:
        out += [*_open("message", {"role": "assistant"}), *_open("think" if thinking else "response")]
    return [piece for piece in out if piece.text]


def escape(value: str) -> str:
    """An attribute's value as it stands between quotes."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))


def _open(tag: str, attributes: Mapping[str, str] | None = None, *, learned: bool = False) -> list[Piece]:
    inside = [tag]
    for key, value in (attributes or {}).items():
        inside += [f" {key}", '="', escape(value), '"']
    return [Piece(OPEN, True, learned), *(Piece(text, False, learned) for text in inside), Piece(SEP, True, learned)]


def _close(tag: str, *, learned: bool = False) -> list[Piece]:
    return [Piece(CLOSE, True, learned), Piece(tag, False, learned), Piece(SEP, True, learned)]


def _message(attributes: Mapping[str, str], body: Sequence[Piece], *, learned: bool = False) -> list[Piece]:
    return [*_open("message", attributes), *body, *_close("message", learned=learned), Piece(END_OF_MESSAGE, True, learned)]


def _conversation(position: int, message: Mapping[str, Any], thinking: bool, images: _Images) -> list[Piece]:
    role = message["role"]
    attributes = {"role": role}
    if role == "tool":
        attributes |= {"tool": message["tool"], "index": str(message["index"])}
    elif message.get("name"):
        attributes["name"] = message["name"]
    if role == "assistant":
        return _assistant(position, message, attributes, thinking)
    if role == "system" and message.get("tools"):
        return _message(attributes | {"type": "tool-declare"}, [Piece(_MORE_TOOLS_TEXT.format(_compact(message["tools"])), False)])
    return _message(attributes, list(_body(position, message, images)))


def _assistant(position: int, message: Mapping[str, Any], attributes: Mapping[str, str], thinking: bool) -> list[Piece]:
    body: list[Piece] = []
    if thinking:
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        body += [*_open("think"), Piece(reasoning if reasoning.strip() else "", False, True), *_close("think", learned=True)]
    # What opens the first channel is the generation prompt's, not the assistant's.
    body += _open("response", learned=thinking)
    body += [Piece(piece.text, False, True) for piece in _body(position, message, _Images(None))]
    body += _close("response", learned=True)
    calls = message.get("tool_calls") or []
    if calls:
        body += _open("tools", learned=True)
        for index, call in enumerate(calls, start=1):
            body += _call(call["function"], index)
        body += _close("tools", learned=True)
    return _message(attributes, body, learned=True)


def _call(function: Mapping[str, Any], index: int) -> list[Piece]:
    out = _open("call", {"tool": function["name"], "index": str(index)}, learned=True)
    arguments = function.get("arguments", {})
    parsed = _parsed(arguments)
    if parsed is None:
        out += [*_open("json", {"type": "object"}, learned=True), Piece(arguments, False, True), *_close("json", learned=True)]
    else:
        for key, value in parsed.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            out += _open("argument", {"key": key, "type": _type_of(value)}, learned=True)
            out += [Piece(text, False, True), *_close("argument", learned=True)]
    return out + _close("call", learned=True)


def _parsed(arguments: Any) -> Mapping[str, Any] | None:
    """Arguments as an object; None when the string that came is not one."""
    if isinstance(arguments, Mapping):
        return arguments
    try:
        value = json.loads(arguments)
    except (json.JSONDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    for name, kinds in (("string", str), ("boolean", bool), ("number", (int, float)), ("object", Mapping)):
        if isinstance(value, kinds):
            return name
    return "array"


def _response_format(response_format: Mapping[str, Any] | None) -> list[Piece]:
    kind = (response_format or {}).get("type", "text")
    if kind == "text":
        return []
    if kind not in ("json_object", "json_schema"):
        raise UserError(f"response_format {kind!r} is not supported; it is text, json_object or json_schema")
    text = _FORMAT_TEXT.format(kind)
    if kind == "json_schema":
        schema = (response_format or {}).get("json_schema")
        if not isinstance(schema, Mapping) or "schema" not in schema:
            raise UserError("response_format json_schema needs a json_schema object that holds a schema")
        text += _SCHEMA_TEXT.format(_compact(schema["schema"]))
    return _message({"role": "system", "type": "response-format"}, [Piece(text, False)])


class _Images:
    """Hands out the texts that stand for images, in order."""

    def __init__(self, prompts: Sequence[str] | None) -> None:
        self._prompts = list(prompts) if prompts is not None else None
        self._used = 0

    def take(self, position: int) -> Piece:
        if self._prompts is None:
            raise UserError(f"message {position}: images need image_prompts; openk3 itself reads text only")
        if self._used == len(self._prompts):
            raise UserError(f"message {position}: more images than image prompts ({len(self._prompts)})")
        self._used += 1
        return Piece(self._prompts[self._used - 1], True)

    @property
    def wanted(self) -> bool:
        return self._prompts is not None

    def finish(self) -> None:
        if self._prompts is not None and self._used != len(self._prompts):
            raise UserError(f"{len(self._prompts)} image prompts were given, the messages hold {self._used} images")


def _body(position: int, message: Mapping[str, Any], images: _Images) -> Iterator[Piece]:
    content = message.get("content")
    if content is None:
        return
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    for part in content:
        if part["type"] != "text":
            yield images.take(position)
            continue
        # Placeholders are images only where the caller brought images; anywhere else they are what they look like: text.
        texts = part["text"].split(IMAGE_PLACEHOLDER) if images.wanted else [part["text"]]
        for index, text in enumerate(texts):
            if index:
                yield images.take(position)
            yield Piece(text, False)


def _ordered(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Checked messages with their positions; tool results get their tool's name and stand in the order of the calls."""
    calls: Sequence[Mapping[str, Any]] = []
    run: list[tuple[int, Mapping[str, Any]]] = []
    for position, message in enumerate(messages):
        check_message(position, message)
        if message["role"] == "tool":
            run.append((position, message))
            continue
        yield from _results(run, calls)
        run = []
        if message["role"] == "assistant":
            calls = message.get("tool_calls") or []
        yield position, message
    yield from _results(run, calls)


def _results(run: list[tuple[int, Mapping[str, Any]]], calls: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    places = {call.get("id"): place for place, call in enumerate(calls) if call.get("id") is not None}
    if run and all(message.get("tool_call_id") in places for _, message in run):
        for position, message in sorted(run, key=lambda item: places[item[1]["tool_call_id"]]):
            place = places[message["tool_call_id"]]
            yield position, {**message, "tool": calls[place]["function"]["name"], "index": place + 1}
        return
    for place, (position, message) in enumerate(run):
        name = message.get("tool") or message.get("name")
        if not name and place < len(calls):
            name = calls[place]["function"]["name"]
        if not name:
            raise UserError(f"message {position}: a tool result needs its tool's name, or a call before it that it answers")
        yield position, {**message, "tool": name, "index": place + 1}


def check_message(position: int, message: Any) -> None:
    """Raise UserError, naming the message by its position from 0, unless it has the OpenAI shape."""
    where = f"message {position}"
    if not isinstance(message, Mapping):
        raise UserError(f"{where} is {type(message).__name__}, not an object")
    role = message.get("role")
    if role not in ROLES:
        raise UserError(f"{where} has no role" if role is None else f"{where} has the role {role!r}; it is one of {', '.join(ROLES)}")
    unknown = sorted(set(message) - _KEYS[role])
    if unknown:
        raise UserError(f"{where}: {_article(role)} {role} message has no key {unknown[0]!r}; it has {', '.join(sorted(_KEYS[role]))}")
    _check_content(where, message)
    for key in ("name", "reasoning_content", "reasoning", "tool", "tool_call_id"):
        if message.get(key) is not None and not isinstance(message[key], str):
            raise UserError(f"{where}: {key} is a string, not {type(message[key]).__name__}")
    _check_calls(where, message.get("tool_calls"))


def _article(role: str) -> str:
    return "an" if role == "assistant" else "a"


def _check_content(where: str, message: Mapping[str, Any]) -> None:
    content = message.get("content")
    if content is None:
        if message["role"] in ("user", "tool") or (message["role"] == "system" and not message.get("tools")):
            raise UserError(f"{where}: a {message['role']} message needs content")
        return
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise UserError(f"{where}: content is a string or a list of parts, not {type(content).__name__}")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in ("text", "image", "image_url"):
            raise UserError(f"{where}: a part of content is an object of type text or image, not {part!r:.60}")
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise UserError(f"{where}: a text part holds a string under text")


def _check_calls(where: str, calls: Any) -> None:
    if calls is None:
        return
    if not isinstance(calls, list):
        raise UserError(f"{where}: tool_calls is a list, not {type(calls).__name__}")
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UserError(f"{where}: a tool call holds a function with a name")
        if not isinstance(call.get("id"), (str, type(None))):
            raise UserError(f"{where}: the id of a tool call is a string, not {type(call['id']).__name__}")
        if not isinstance(function.get("arguments", {}), (str, Mapping)):
            raise UserError(f"{where}: the arguments of {function['name']} are an object or a JSON string")
