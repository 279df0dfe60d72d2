"""Conversations made from sources: what is asked is a signature with its docstring, what is answered the body under it."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from openk3.errors import UserError
from openk3.text.code_conversations import LONGEST_ANSWER, conversations, write_conversations
from openk3.text.conversations import read_conversations
from openk3.text.corpus import standard_library

SOURCE = '''
class Pile:
    def top(self, default=None):
        """The newest thing.

        Or `default`."""

        # nothing there?
        if not self.things:
            return default
        return self.things[-1]

    def silent(self):
        return 1

def only_words():
    """Nothing to do."""
'''


def test_question_and_answer(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    (tmp_path / "broken.py").write_text("def (")
    (made,) = conversations([tmp_path / "a.py", tmp_path / "broken.py", tmp_path / "no.py"])
    question, answer = (message["content"] for message in made["messages"])
    assert question == 'def top(self, default=None):\n    """The newest thing.\n\n    Or `default`."""'
    assert answer.splitlines()[:2] == ["    # nothing there?", "    if not self.things:"]
    ast.parse(question + "\n" + answer)


def test_of_the_standard_library_there_are_many_and_they_are_python(tmp_path: Path) -> None:
    count = write_conversations(standard_library()[:150], tmp_path / "c.jsonl")
    assert count > 300
    read = list(read_conversations([str(tmp_path / "c.jsonl")]))
    assert len(read) == count and not read[0].thinking
    for line in (tmp_path / "c.jsonl").read_text().splitlines()[:200]:
        question, answer = (message["content"] for message in json.loads(line)["messages"])
        assert len(answer) <= LONGEST_ANSWER
        ast.parse(question + "\n" + answer)


def test_nothing_to_make_one_of(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no documented function"):
        write_conversations([], tmp_path / "c.jsonl")
    assert not list(tmp_path.iterdir())
