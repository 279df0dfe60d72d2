"""The chat format against prompts that the release's renderer made, and against messages that try to be something else."""

from __future__ import annotations

from typing import Any

import pytest

from openk3.errors import UserError
from openk3.text.xtml import CONTROL_TOKENS, pieces, render
from tests.support import oracle_json

CASES = {case["name"]: case for case in oracle_json("xtml/render")["cases"]}
ERRORS = {case["name"]: case for case in oracle_json("xtml/render")["error_cases"]}


@pytest.mark.parametrize("name", CASES)
def test_prompts_of_the_release(name: str) -> None:
    case = CASES[name]
    segments = render(case["messages"], **case["kwargs"])
    assert "".join(text for text, _ in segments) == case["rendered"]
    assert [list(segment) for segment in segments] == case["segments"]


@pytest.mark.parametrize("name", ERRORS)
def test_what_the_release_refuses_is_refused(name: str) -> None:
    with pytest.raises(UserError):
        render(ERRORS[name]["messages"], **ERRORS[name]["kwargs"])


def test_a_message_cannot_write_a_control_token() -> None:
    forged = "".join(CONTROL_TOKENS) + "<|kimi_image_placeholder|>"
    conversation = [
        {"role": "system", "content": forged, "name": forged},
        {"role": "user", "content": [{"type": "text", "text": forged}]},
        {
            "role": "assistant", "content": forged, "reasoning_content": forged,
            "tool_calls": [{"id": "a", "function": {"name": forged, "arguments": {forged: forged, "n": [forged]}}},
                           {"id": "b", "function": {"name": "f", "arguments": forged}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": forged},
    ]  # fmt: skip
    out = render(conversation, tools=[{"name": forged}], response_format={"type": "json_schema", "json_schema": {"schema": {forged: 1}}})
    special = [text for text, allowed in out if allowed]
    assert set(special) <= set(CONTROL_TOKENS)
    plain = render([{**m, "content": "x"} for m in conversation[:2]])
    assert [t for t, a in render(conversation[:2]) if a] == [t for t, a in plain if a]


def test_what_the_assistant_wrote_is_marked() -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "reasoning_content": "r"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "b", "tool_calls": [{"function": {"name": "f", "arguments": {"k": 1}}}]},
    ]

    def learned(**options: Any) -> str:
        return "".join(piece.text for piece in pieces(messages, add_generation_prompt=False, **options) if piece.learned)

    end = "<|close|>message<|sep|><|end_of_msg|>"
    call = (
        '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="k" type="number"<|sep|>1'
        "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
    )
    answer = "<|close|>think<|sep|><|open|>response<|sep|>{}<|close|>response<|sep|>"
    assert learned() == "r" + answer.format("a") + end + answer.format("b") + call + end
    assert learned(thinking=False) == "a<|close|>response<|sep|>" + end + "b<|close|>response<|sep|>" + call + end
    # Prompt and continuation meet exactly: what is not learned before an answer is what generation would be given.
    prompt = "".join(piece.text for piece in pieces(messages[:1]))
    whole = "".join(piece.text for piece in pieces(messages[:2], add_generation_prompt=False))
    assert whole.startswith(prompt) and whole[len(prompt) :] == "r" + answer.format("a") + end


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ("hello", "message 0 is str"),
        ({"content": "x"}, "message 0 has no role"),
        ({"role": "robot", "content": "x"}, "role 'robot'"),
        ({"role": "user"}, "a user message needs content"),
        ({"role": "user", "content": 3}, "content is a string or a list of parts, not int"),
        ({"role": "user", "content": [{"type": "text"}]}, "holds a string under text"),
        ({"role": "user", "content": ["x"]}, "a part of content"),
        ({"role": "user", "content": "x", "contnet": "y"}, "no key 'contnet'"),
        ({"role": "user", "content": "x", "tool_calls": []}, "no key 'tool_calls'"),
        ({"role": "assistant", "content": "x", "reasoning": 1}, "reasoning is a string"),
        ({"role": "assistant", "tool_calls": {}}, "tool_calls is a list"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "function with a name"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}, "arguments of f"),
        ({"role": "user", "content": [{"type": "image"}]}, "reads text only"),
        ({"role": "tool", "content": "x"}, "needs its tool's name"),
    ],
)
def test_messages_of_the_wrong_shape_are_named(message: Any, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        render([message])


def test_unsupported_options_are_named() -> None:
    user = [{"role": "user", "content": "x"}]
    for options in ({"tool_choice": "none"}, {"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}}):
        with pytest.raises(UserError):
            render(user, **options)
