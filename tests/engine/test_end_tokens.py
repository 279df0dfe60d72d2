"""Which tokens end a text when the files of a checkpoint say different things."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openk3.engine.end_tokens import check_special_ids, end_tokens
from openk3.errors import UserError

SPECIAL = {"[BOS]": 163584, "[EOS]": 163585, "<|end_of_msg|>": 163586}


def write(directory: Path, **files: Any) -> Path:
    for name, content in files.items():
        (directory / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return directory


def test_the_union_is_taken_and_the_disagreement_named(tmp_path: Path) -> None:
    write(
        tmp_path,
        config={"eos_token_id": 163586, "text_config": {"eos_token_id": 163586}},
        generation_config={"eos_token_id": [163586, 7]},
        tokenizer_config={"eos_token": "[EOS]"},
    )
    found = end_tokens(tmp_path, tmp_path, SPECIAL)
    assert found.ids == {163585, 163586, 7}
    assert found.disagreement is not None
    assert "config.json says 163586" in found.disagreement
    assert "generation_config.json says 7 and 163586" in found.disagreement
    assert "tokenizer_config.json says 163585" in found.disagreement


def test_files_that_agree_or_say_nothing_are_no_disagreement(tmp_path: Path) -> None:
    write(tmp_path, config={"text_config": {"eos_token_id": 163585}}, tokenizer_config={"eos_token": {"content": "[EOS]"}})
    found = end_tokens(tmp_path, tmp_path, SPECIAL)
    assert found.ids == {163585} and found.disagreement is None
    nothing = end_tokens(tmp_path / "none", tmp_path / "none", SPECIAL)
    assert nothing.ids == frozenset() and nothing.disagreement is None


def test_tokenizer_may_lie_elsewhere(tmp_path: Path) -> None:
    checkpoint, run = tmp_path / "checkpoint", tmp_path / "run"
    checkpoint.mkdir()
    run.mkdir()
    write(checkpoint, config={"eos_token_id": 1})
    write(run, tokenizer_config={"eos_token_id": 2})
    assert end_tokens(checkpoint, run, {}).ids == {1, 2}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config": {"eos_token": "</s>"}}, "names the end token '</s>', which the tokenizer does not have"),
        ({"config": {"eos_token_id": "2"}}, "config.json: eos_token_id is '2'"),
        ({"config": {"eos_token_id": [1, -2]}}, "eos_token_id is"),
        ({"config": {"eos_token_id": True}}, "eos_token_id is True"),
        ({"generation_config": "{"}, "generation_config.json cannot be read as JSON"),
        ({"generation_config": "[1]"}, "must hold a JSON object"),
    ],
)
def test_files_that_make_no_sense_are_named(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    write(tmp_path, **files)
    with pytest.raises(UserError, match=message):
        end_tokens(tmp_path, tmp_path, SPECIAL)


def test_renumbered_control_tokens_are_noticed(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config={"added_tokens_decoder": {"163585": {"content": "[EOS]"}, "5": {"content": "[other]"}}})
    check_special_ids(tmp_path, SPECIAL)
    write(tmp_path, tokenizer_config={"added_tokens_decoder": {"163584": {"content": "[EOS]"}}})
    with pytest.raises(UserError, match=r"\[EOS\] is token 163584, the tokenizer says 163585"):
        check_special_ids(tmp_path, SPECIAL)
