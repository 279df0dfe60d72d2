"""`openk3 generate` from the command line."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from openk3.commands import generate
from openk3.engine.session import Session
from openk3.errors import UserError
from tests.engine import tiny


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("run"))


def as_json(run: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert generate.main([str(run), "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_text_goes_to_stdout_and_figures_to_stderr(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate.main([str(run), "--prompt", "def f", "--max-tokens", "12", "--seed", "4"]) == 0
    shown = capsys.readouterr()
    found = as_json(run, capsys, "--prompt", "def f", "--max-tokens", "12", "--seed", "4")
    assert shown.out == found["text"]
    assert "prefill" in shown.err and "decode" in shown.err and "seed 4" in shown.err
    assert shown.err.count("\n") == 1


def test_json_says_everything(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(
        run, capsys, "--prompt", "x", "--max-tokens", "5", "--temperature", "0", "--top-k", "3", "--top-p", "0.5", "--min-p", "0.1"
    )
    assert found["finish_reason"] in ("length", "stop")
    assert found["prompt"] == "x" and len(found["ids"]) == len(found["logprobs"]) <= 5
    assert found["params"] == {"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "seed": 0}
    assert found["checkpoint"] == str(run)
    assert all(value <= 0 for value in found["logprobs"])
    assert found["timing"]["prompt_tokens"] == len(found["prompt_ids"])


def test_same_seed_same_text(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [as_json(run, capsys, "--seed", seed, "--temperature", "1.5", "--max-tokens", "20")["ids"] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_stop_strings_may_be_several(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    free = as_json(run, capsys, "--temperature", "2", "--max-tokens", "60", "--top-p", "1")
    stop = free["text"][10:12]
    found = as_json(run, capsys, "--temperature", "2", "--max-tokens", "60", "--top-p", "1", "--stop", "never there", "--stop", stop)
    assert found["stop"] == stop and found["finish_reason"] == "stop"
    assert found["text"] == free["text"][: free["text"].index(stop)]


def test_prompt_from_a_file_and_from_stdin(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "class Größe:\n"
    (tmp_path / "prompt.txt").write_text(text, encoding="utf-8")
    assert as_json(run, capsys, "--prompt-file", str(tmp_path / "prompt.txt"), "--max-tokens", "1")["prompt"] == text
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert as_json(run, capsys, "--prompt-file", "-", "--max-tokens", "1")["prompt"] == text


def test_streams_utf8_whatever_the_locale(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert generate.main([str(run), "--temperature", "3", "--top-p", "1", "--max-tokens", "150"]) == 0
    assert raw.getvalue().decode("utf-8")


def test_interrupt_keeps_what_was_produced(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    complete = Session.complete

    def interrupted(self: Session, *arguments: Any, **settings: Any) -> Any:
        show, seen = settings["on_text"], []

        def hear(sequence: int, piece: str) -> None:
            show(sequence, piece)
            seen.append(piece)
            if len(seen) == 5:
                os.kill(os.getpid(), signal.SIGINT)

        return complete(self, *arguments, **settings | {"on_text": hear})

    monkeypatch.setattr(Session, "complete", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert generate.main([str(run), "--prompt", "a", "--max-tokens", "100000", "--temperature", "0"]) == 130
    shown = capsys.readouterr()
    assert shown.out and "ended by cancelled" in shown.err
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--temperature", "warm"], "temperature"),
        (["--top-p", "1.5"], "top_p is 1.5"),
        (["--min-p", "2"], "min_p is 2.0"),
        (["--top-k", "-3"], "top_k is -3"),
        (["--seed", "-1"], "seed is -1"),
        (["--max-tokens", "-1"], "max-tokens is -1"),
        (["--stop", ""], "stop string is empty"),
        (["--prompt", "a", "--prompt-file", "b"], "not both"),
        (["--prompt-file", "no/such/file"], "no/such/file: No such file"),
        (["--no-such-flag"], "no-such-flag"),
    ],
)
def test_bad_arguments_are_one_clear_line(run: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        generate.main([str(run), *arguments])
    assert "\n" not in str(caught.value)


def test_prompt_file_that_is_no_text(run: Path, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"ab\xff\xfe")
    with pytest.raises(UserError, match="not UTF-8 text \\(byte 2\\)"):
        generate.main([str(run), "--prompt-file", str(tmp_path / "binary")])


def test_runs_that_are_not_there(tmp_path: Path, run: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        generate.main([str(tmp_path / "nowhere")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="neither a checkpoint nor a run"):
        generate.main([str(tmp_path / "empty")])
    young = tmp_path / "young"
    (young / "checkpoints").mkdir(parents=True)
    shutil.copy(run / "config.json", young)
    with pytest.raises(UserError, match="without a complete checkpoint"):
        generate.main([str(young)])


def test_end_tokens_that_disagree_are_reported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = shutil.copytree(run, tmp_path / "other")
    (other / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert generate.main([str(other), "--max-tokens", "1"]) == 0
    assert "generation_config.json says 9" in capsys.readouterr().err
