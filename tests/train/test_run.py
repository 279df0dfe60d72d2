"""Run directories: who may write where, and what a crash leaves."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from openk3.errors import UserError
from openk3.train.config import TrainConfig
from openk3.train.run import LOCK, TEMPORARY, Metrics, RunDirectory, write_atomically


def made(path: Path, config: TrainConfig | None = None) -> Path:
    with RunDirectory.create(path) as run:
        run.commit(config or TrainConfig(), {"model_type": "kimi_k3"})
    return path


def test_a_run_is_made_and_opened_again(tmp_path: Path) -> None:
    config = TrainConfig(seed=5)
    path = made(tmp_path / "deep" / "run", config)
    with RunDirectory.open(path) as run:
        assert run.settings() == config
        assert json.loads((path / "config.json").read_text()) == {"model_type": "kimi_k3"}
        assert run.checkpoints.is_dir()


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    path = made(tmp_path / "run")
    with pytest.raises(UserError, match=r"already holds a run: go on with `openk3 resume .*run`, or give another --out"):
        RunDirectory.create(path)


def test_a_directory_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    (tmp_path / "tokens").mkdir()
    with pytest.raises(UserError, match=r"is not empty \(it holds thesis.tex\) and is no run"):
        RunDirectory.create(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"thesis.tex", "tokens"}


def test_what_looks_like_a_preparation_counts_only_beside_our_lock(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="it holds tokenizer.json"):
        RunDirectory.create(tmp_path)
    assert (tmp_path / "tokenizer.json").exists()


def test_a_killed_preparation_is_cleared(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path).close()
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "train.bin").write_text("half")
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / f"{TEMPORARY}config.toml").write_text("se")
    with pytest.raises(UserError, match=r"holds no config.toml \(its preparation was interrupted: start it again"):
        RunDirectory.open(tmp_path)
    with RunDirectory.create(tmp_path):
        assert {entry.name for entry in tmp_path.iterdir()} == {LOCK}


def test_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such directory"):
        RunDirectory.open(tmp_path / "nothing")
    with pytest.raises(UserError, match="holds no config.toml$"):
        RunDirectory.open(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        RunDirectory.create(tmp_path / "file" / "run")
    with pytest.raises(UserError, match="cannot be made"):
        RunDirectory.create(tmp_path / "file")


def test_two_in_one_directory(tmp_path: Path) -> None:
    path = made(tmp_path / "run")
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from openk3.train.run import RunDirectory as R; r = R.open({str(path)!r}); print('in', flush=True); input()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "in\n"
    with pytest.raises(UserError, match=rf"another openk3 is training in .*run \(process {holder.pid}\)"):
        RunDirectory.open(path)
    holder.kill()
    holder.wait()
    # The system lets go of a dead process's lock: nothing has to be cleaned up by hand.
    RunDirectory.open(path).close()


def test_two_preparing_one_directory(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path), pytest.raises(UserError, match="another openk3 is training in"):
        RunDirectory.create(tmp_path)


def test_opening_clears_what_a_killed_save_left(tmp_path: Path) -> None:
    path = made(tmp_path / "run")
    (path / "checkpoints" / f"{TEMPORARY}step-00000001").mkdir()
    (path / "checkpoints" / f"{TEMPORARY}step-00000001" / "model.safetensors").write_text("half")
    (path / f"{TEMPORARY}metrics.jsonl").write_text("half")
    RunDirectory.open(path).close()
    assert not list(path.rglob(f"{TEMPORARY}*"))


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    path = made(tmp_path / "run")
    (path / "config.toml").write_text("seed = 1\nsed = 2\n")
    with RunDirectory.open(path) as run, pytest.raises(UserError, match=r"config.toml: sed is not a setting; did you mean 'seed'"):
        run.settings()


def test_atomic_writing_keeps_the_old_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write_atomically(file, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(file, "new")
    assert file.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_metrics_are_json_even_when_a_number_is_not(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.append({"step": 1, "loss": math.nan, "balance": {"3": [math.inf, 0.5]}, "heldout": None})
    metrics.close()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "loss": null, "balance": {"3": [null, 0.5]}, "heldout": null}\n'


def test_metrics_are_cut_back_to_a_step(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    metrics = Metrics(file)
    for step in range(1, 6):
        metrics.append({"step": step, "loss": 1.0 / step})
    metrics.close()
    with file.open("a") as torn:
        torn.write('{"step": 6, "lo')
    assert [row["step"] for row in Metrics.read(file)] == [1, 2, 3, 4, 5]
    Metrics.truncate(file, 3)
    more = Metrics(file)
    more.append({"step": 4, "loss": 9.0})
    more.close()
    assert [(row["step"], row["loss"]) for row in Metrics.read(file)] == [(1, 1.0), (2, 0.5), (3, 1.0 / 3), (4, 9.0)]
    assert list(Metrics.read(tmp_path / "none.jsonl")) == []
