"""`openk3 train`, `resume` and `eval` as a person calls them: exit codes, one line for each fault, and what is printed at the end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from openk3.cli import main
from openk3.text.tokenizer import Tokenizer
from openk3.train import checkpointing, plot
from openk3.train.checkpointing import listed
from openk3.train.config import TrainConfig
from openk3.train.run import Metrics, RunDirectory
from tests.train.runs import tiny, write_text


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than the runs."""
    monkeypatch.setattr(plot, "draw", lambda metrics, target: None)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with texts, a file of settings, and a finished run of two steps."""
    home = tmp_path_factory.mktemp("home")
    write_text(home / "text")
    (home / "tiny.toml").write_text(tiny(Path("unused"), steps=2).to_toml(), encoding="utf-8")
    assert main(["train", str(home / "text"), "--config", str(home / "tiny.toml"), "--out", str(home / "run"), "--quiet"]) == 0
    return home


Failure = Any


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Failure:
    """Run a command that must exit with 2 and one line on stderr; the line."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 2
        out, err = capsys.readouterr()
        lines = err.strip().splitlines()
        assert out == "" and lines and lines[-1].startswith(f"openk3 {arguments[0]}: error: "), err
        assert sum("error" in line for line in lines) == 1 and "Traceback" not in err
        return lines[-1]

    return run


def test_train_says_how_it_ended(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "train",
        str(home / "text"),
        "--config",
        str(home / "tiny.toml"),
        "--out",
        str(tmp_path / "run"),
        "--steps",
        "3",
        "--seed",
        "9",
    ]
    assert main([*arguments, "--optimizer.lr", "0.01", "--set", "num_layers=2", "--set", "attn_res_block_size=none"]) == 0
    out, err = capsys.readouterr()
    assert "done: step 3, 288 tokens" in out and "held out" in out and f"openk3 generate {tmp_path / 'run'}" in out
    assert "40 documents" in err and "step 3/3 (100.0%)" in err
    config = TrainConfig.from_toml(tmp_path / "run" / "config.toml")
    assert (config.schedule.steps, config.seed, config.optimizer.lr, config.data.paths) == (3, 9, 0.01, (str(home / "text"),))
    model = json.loads((tmp_path / "run" / "config.json").read_text())
    assert model["text_config"]["num_hidden_layers"] == 2 and model["text_config"].get("attn_res_block_size") is None


def test_quiet_is_quiet(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(home / "text"), "--config", str(home / "tiny.toml"), "--out", str(tmp_path / "run"), "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.startswith("done: step 2")


def test_help_is_readable(capsys: pytest.CaptureFixture[str]) -> None:
    for verb, part in (("train", "--optimizer.lr"), ("resume", "--minutes"), ("eval", "--context")):
        assert main([verb, "--help"]) == 0
        out, _ = capsys.readouterr()
        assert part in out and f"openk3 {verb} " in out and "Examples" in out


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from openk3.cli import main; main(['train', '--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


def test_from_a_run(home: Path, tmp_path: Path) -> None:
    settings = tmp_path / "next.toml"
    settings.write_text("[data]\ntokens_per_batch = 96\nsequence_length = 40\n[compute]\nthreads = 1\n", encoding="utf-8")
    arguments = ["train", str(home / "text"), "--config", str(settings), "--from", str(home / "run"), "--out", str(tmp_path / "next")]
    assert main([*arguments, "--steps", "1", "--quiet"]) == 0
    assert (tmp_path / "next" / "tokenizer.json").read_bytes() == (home / "run" / "tokenizer.json").read_bytes()
    assert [checkpoint.step for checkpoint in listed(tmp_path / "next" / "checkpoints")] == [0, 1]


def test_settings_that_are_wrong(home: Path, tmp_path: Path, fails: Failure) -> None:
    out, text, file = tmp_path / "run", home / "text", tmp_path / "bad.toml"
    file.write_text("[optimizer]\nlearning_rate = 1.0\n", encoding="utf-8")
    assert f"{file}: optimizer.learning_rate is not a setting" in fails("train", text, "--config", file, "--out", out)
    file.write_text("[optimizer\n", encoding="utf-8")
    assert f"{file}: not valid TOML" in fails("train", text, f"--config={file}", "--out", out)
    assert "there is no such file" in fails("train", text, "--config", tmp_path / "none.toml", "--out", out)
    assert "--out DIRECTORY" in fails("train", text, "--steps", 2)
    assert "--optimizer.lrr" in fails("train", text, "--out", out, "--steps", 2, "--optimizer.lrr", 1)
    assert "optimizer.lr = -1.0 is out of range" in fails("train", text, "--out", out, "--steps", 2, "--optimizer.lr", -1.0)
    assert "schedule.steps and schedule.minutes are both given" in fails("train", text, "--out", out, "--steps", 2, "--minutes", 1)
    assert "--set hidden: it must be NAME=VALUE" in fails("train", text, "--out", out, "--steps", 2, "--set", "hidden")
    assert "no field 'hidden'" in fails("train", text, "--out", out, "--steps", 2, "--set", "hidden=5")
    assert "nanoo" in fails("train", text, "--out", out, "--steps", 2, "--model", "nanoo")
    assert "give --steps, --minutes or --tokens" in fails("train", text, "--out", out)
    assert "no text was named" in fails("train", "--out", out, "--steps", 2)
    assert not out.exists()


def test_texts_that_are_wrong(home: Path, tmp_path: Path, fails: Failure) -> None:
    file = tmp_path / "text.txt"
    common = ("--config", home / "tiny.toml", "--out", tmp_path / "run")
    for content, said in (
        (b"", "no text in"),
        (b"\x7fELF\x00\x00", "zero byte"),
        (b"\xff\xfe" * 200, "not UTF-8"),
        (b"word " * 12, "batch|divided|held"),
    ):
        file.write_bytes(content)
        line = fails("train", file, *common)
        assert any(part in line for part in said.split("|")), line
    assert "does not exist" in fails("train", tmp_path / "none.txt", *common)
    assert not (tmp_path / "run").exists()


def test_a_directory_that_is_taken(home: Path, tmp_path: Path, fails: Failure) -> None:
    common = (home / "text", "--config", home / "tiny.toml")
    before = (home / "run" / "metrics.jsonl").read_bytes()
    assert "already holds a run: go on with `openk3 resume" in fails("train", *common, "--out", home / "run")
    assert "is not empty" in fails("train", *common, "--out", home)
    with RunDirectory.open(home / "run"):
        assert "another openk3 is training in" in fails("resume", home / "run")
    assert (home / "run" / "metrics.jsonl").read_bytes() == before


def test_a_checkpoint_that_is_missing_or_cut_off(home: Path, tmp_path: Path, fails: Failure) -> None:
    common = ("--out", tmp_path / "next", "--steps", 1)
    assert "does not exist" in fails("train", home / "text", "--from", tmp_path / "none", *common)
    assert "does not exist" in fails("eval", tmp_path / "none", home / "text")
    assert "is not a run directory" in fails("resume", tmp_path / "none")
    shutil.copytree(home / "run" / "checkpoints" / "step-00000002", tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "model.safetensors" in fails("eval", tmp_path / "cut", home / "text")
    settings = tmp_path / "small.toml"
    settings.write_text("[data]\ntokens_per_batch = 96\nsequence_length = 40\n", encoding="utf-8")
    assert "model.safetensors" in fails("train", home / "text", "--config", settings, "--from", tmp_path / "cut", *common)
    shutil.copytree(home / "run", tmp_path / "run")
    damaged = tmp_path / "run" / "checkpoints" / "step-00000002" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:5000])
    assert "no checkpoint of" in (line := fails("resume", tmp_path / "run")) and "truncated" in line


def test_tokenizer_and_checkpoint_that_disagree(home: Path, tmp_path: Path, fails: Failure) -> None:
    Tokenizer.train(["other text " * 40], 310).save(tmp_path / "other")
    line = fails(
        "train", home / "text", "--from", home / "run", "--data.tokenizer", tmp_path / "other", "--out", tmp_path / "next", "--steps", 1
    )
    assert "is not the one that" in line
    shutil.copytree(home / "run" / "checkpoints" / "step-00000002", tmp_path / "mixed")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "other" / name, tmp_path / "mixed" / name)
    assert "disagree" in fails("eval", tmp_path / "mixed", home / "text")


def test_what_cannot_fit(home: Path, tmp_path: Path, fails: Failure) -> None:
    line = fails("train", home / "text", "--model", "k3", "--out", tmp_path / "run", "--steps", 1)
    assert "TiB of memory (" in line and "weights" in line and "optimizer" in line and "are available" in line


def test_a_full_disk(home: Path, tmp_path: Path, fails: Failure, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    common = (home / "text", "--config", home / "tiny.toml", "--out", tmp_path / "run", "--steps", 5, "--quiet")
    saves = 0
    write = checkpointing._write

    def second_fails(*arguments: Any) -> None:
        nonlocal saves
        saves += 1
        write(*arguments) if saves == 1 else full()

    monkeypatch.setattr(checkpointing, "_write", second_fails)
    line = fails("train", *common)
    assert (
        "step 5 could not be written" in line and "No space left on device; make room and resume; the checkpoint of step 3 is whole" in line
    )
    monkeypatch.undo()
    assert main(["resume", str(tmp_path / "run"), "--quiet"]) == 0
    assert [row["step"] for row in Metrics.read(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_resume_a_finished_run(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], fails: Failure) -> None:
    shutil.copytree(home / "run", tmp_path / "run")
    assert main(["resume", str(tmp_path / "run"), "--quiet"]) == 0
    assert "is finished: step 2" in capsys.readouterr().out
    assert main(["resume", str(tmp_path / "run"), "--steps", "3", "--quiet"]) == 0
    assert "done: step 3" in capsys.readouterr().out
    assert "give one of --steps, --minutes and --tokens" in fails("resume", tmp_path / "run", "--steps", 3, "--minutes", 1)
    assert "schedule.steps is 0" in fails("resume", tmp_path / "run", "--steps", 0)


def test_eval_prints_a_table_or_json(home: Path, capsys: pytest.CaptureFixture[str], fails: Failure) -> None:
    files = [str(home / "text" / "000.txt"), str(home / "text")]
    assert main(["eval", str(home / "run"), *files, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["text"] for row in result["texts"]] == files and result["context"] == 40
    assert result["total"]["tokens"] == sum(row["tokens"] for row in result["texts"])
    assert result["texts"][0]["bytes"] == (home / "text" / "000.txt").stat().st_size
    assert 0 < result["total"]["bits_per_byte"] < 8 and result["checkpoint"].endswith("step-00000002")
    assert main(["eval", str(home / "run"), *files]) == 0
    table = capsys.readouterr().out
    assert "bits/byte" in table and "total" in table and f"{result['total']['loss']:.4f}" in table
    assert "no text was named" in fails("eval", home / "run")
    assert "--context is 0" in fails("eval", home / "run", files[0], "--context", 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_says_how_to_go_on(home: Path, tmp_path: Path, number: signal.Signals) -> None:
    run = tmp_path / "run"
    arguments = ["train", str(home / "text"), "--config", str(home / "tiny.toml"), "--out", str(run), "--steps", "100000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "openk3", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    deadline = time.monotonic() + 120
    while not list(Metrics.read(run / "metrics.jsonl")) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number, err
    assert "stopped and saved at step" in out and f"go on with: openk3 resume {run}" in out
    last = listed(run / "checkpoints")[-1]
    assert last.verify() is None and last.step == [row["step"] for row in Metrics.read(run / "metrics.jsonl")][-1]


def test_ctrl_c_before_training_leaves_nothing(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("openk3.train.prepare.encode_corpus", interrupted)
    assert main(["train", str(home / "text"), "--config", str(home / "tiny.toml"), "--out", str(tmp_path / "run")]) == 130
    assert not (tmp_path / "run").exists()
