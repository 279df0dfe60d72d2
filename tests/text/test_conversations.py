"""Conversations from JSONL: what is learned is what the assistant wrote; what is wrong is named with its line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from openk3.errors import UserError
from openk3.text.conversations import read_conversations
from openk3.text.token_file import TokenFile
from openk3.text.tokenizer import Tokenizer
from openk3.train.batches import IGNORED, PackedBatches

TALK = {"messages": [{"role": "user", "content": "add two <|open|>"}, {"role": "assistant", "content": "def add(a, b): return a + b"}]}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["def add(a, b):\n    return a + b\n"] * 20, vocab_size=320)


def write(path: Path, *lines: Any) -> str:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n")
    return str(path)


def test_only_the_assistant_is_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = write(tmp_path / "a.jsonl", {**TALK, "thinking": False}, "", TALK)
    first, second = read_conversations([source])
    ids, learned = first.encode(tokenizer)
    text = tokenizer.decode([token for token, mark in zip(ids, learned, strict=True) if mark])
    assert text == "def add(a, b): return a + b<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    ids, learned = second.encode(tokenizer)
    text = tokenizer.decode([token for token, mark in zip(ids, learned, strict=True) if mark])
    assert text.startswith("<|close|>think<|sep|><|open|>response<|sep|>def add")
    control = tokenizer.special_ids["<|open|>"]
    assert ids.count(control) == 4, "what the user wrote is no control token"


def test_batches_of_conversations_predict_only_what_is_learned(tmp_path: Path, tokenizer: Tokenizer) -> None:
    source = write(tmp_path / "a.jsonl", *[TALK] * 9)
    encoded = [conversation.encode(tokenizer) for conversation in read_conversations([source])]
    file = TokenFile.write_marked(tmp_path / "t.bin", encoded, tokenizer)
    file.verify()
    assert file.tokens.tolist() == [token for ids, _ in encoded for token in ids], "nothing begins or ends a conversation but itself"
    batches = PackedBatches(file.whole(), 64, 64)
    seen = 0
    for _ in range(6):
        batch = batches.next()
        for token, target, position in zip(batch.tokens.tolist(), batch.targets.tolist(), _positions(batch), strict=True):
            assert file.tokens[position] == token
            assert file.learned is not None
            wanted = int(file.tokens[position + 1]) if file.learned[position + 1] else IGNORED
            assert target == wanted
            seen += target != IGNORED
        kept = batch.targets[batch.targets >= 0].tolist()
        assert batch.text_bytes == sum(tokenizer.text_lengths[token] for token in kept)
    assert seen


def _positions(batch: Any) -> list[int]:
    return [start + i for start, length in zip(batch.positions, batch.segments.lengths, strict=True) for i in range(length)]


def test_a_damaged_mark_is_seen(tmp_path: Path, tokenizer: Tokenizer) -> None:
    file = TokenFile.write_marked(
        tmp_path / "t.bin", [next(read_conversations([write(tmp_path / "a.jsonl", TALK)])).encode(tokenizer)], tokenizer
    )
    content = bytearray((tmp_path / "t.bin").read_bytes())
    content[-1] ^= 1
    (tmp_path / "t.bin").write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        TokenFile.open(tmp_path / "t.bin").verify()
    (tmp_path / "t.bin").write_bytes(content[:-1])
    with pytest.raises(UserError, match="damaged"):
        TokenFile.open(tmp_path / "t.bin")
    assert file.documents == 1


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no JSON object but list"),
        ({"text": "x"}, "no key 'text'"),
        ({"messages": []}, "a list with something in it"),
        ({"messages": [{"content": "x"}]}, "message 0 has no role"),
        ({"messages": [{"role": "user", "content": ""}, TALK["messages"][1]]}, r"message 0 \(user\) has empty content"),
        ({"messages": [TALK["messages"][0], {"role": "assistant", "content": ""}]}, r"message 1 \(assistant\) has empty content"),
        ({"messages": [{"role": "user", "content": 7}, TALK["messages"][1]]}, "content is a string or a list of parts, not int"),
        ({"messages": [{"role": "user", "content": "x", "mood": "y"}, TALK["messages"][1]]}, "no key 'mood'"),
        ({"messages": [TALK["messages"][0]]}, "nothing to learn"),
        ({**TALK, "thinking": "yes"}, '"thinking" must be true or false'),
        ({**TALK, "tools": {}}, '"tools" must be a list'),
    ],
)
def test_what_is_wrong_is_named_with_its_line(line: Any, complaint: str, tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", TALK, "", line)
    with pytest.raises(UserError, match=rf"a\.jsonl, line 3.*{complaint}"):
        list(read_conversations([source]))


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(json.dumps(TALK).encode()))
    assert [c.source for c in read_conversations([str(tmp_path / "a.jsonl.gz")])] == [f"{tmp_path}/a.jsonl.gz, line 1"]
    for names, complaint in (([str(tmp_path / "no")], "does not exist"), ([str(tmp_path)], "is not a file"), ([], "no conversation")):
        with pytest.raises(UserError, match=complaint):
            list(read_conversations(names))
    (tmp_path / "bytes.jsonl").write_bytes(b'{"messages": "\xff"}\n')
    with pytest.raises(UserError, match="line 1 is not UTF-8"):
        list(read_conversations([str(tmp_path / "bytes.jsonl")]))
