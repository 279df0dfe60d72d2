"""A run that is killed at any moment goes on as if nothing had happened: weights, optimizer, balancing, position in the data, metrics."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import openk3
from openk3.train import plot
from openk3.train.checkpointing import listed
from openk3.train.loop import resume, train
from tests.train.runs import TINY, fingerprint, process, timeless, tiny, train_or_resume, write_text


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than the runs."""
    monkeypatch.setattr(plot, "draw", lambda metrics, target: None)


def states_equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(states_equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(states_equal, left, right))
    return bool(left == right)


def assert_same_end(run: Path, reference: Path) -> None:
    ours, theirs = listed(run / "checkpoints")[-1], listed(reference / "checkpoints")[-1]
    assert ours.step == theirs.step and ours.verify() is None
    assert fingerprint(ours.path) == fingerprint(theirs.path)
    left, right = ours.training_state(), theirs.training_state()
    del left["seconds"], right["seconds"]
    assert states_equal(left, right)
    assert timeless(run / "metrics.jsonl") == timeless(reference / "metrics.jsonl")


def test_stopping_at_every_step_changes_nothing(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    config = tiny(text, steps=4, accumulation=2, recompute="block")
    assert train(config, tmp_path / "whole").finished
    for _ in range(4):
        _one_step(config, tmp_path / "cut")
    assert_same_end(tmp_path / "cut", tmp_path / "whole")


def test_a_tied_head_stays_tied(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text")
    config = tiny(text, steps=3, overrides={**TINY, "tie_word_embeddings": True})
    train(config, tmp_path / "whole")
    for _ in range(3):
        _one_step(config, tmp_path / "cut")
    assert_same_end(tmp_path / "cut", tmp_path / "whole")
    model = openk3.load(tmp_path / "cut")
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()


def _one_step(config: Any, run: Path) -> None:
    """Ask the run to stop as soon as it has taken a step."""

    def stop(event: Any) -> None:
        if type(event).__name__ == "Step":
            signal.raise_signal(signal.SIGTERM)

    if run.exists():
        resume(run, on_event=stop)
    else:
        train(config, run, on_event=stop)


def crash(config: Any, run: Path, kills: int, longest: float, chance: random.Random) -> int:
    """Kill the run at random moments, `kills` times, then let it finish; how many kills hit it alive."""
    hits = 0
    for _ in range(kills):
        child = process(train_or_resume, config, str(run))
        time.sleep(chance.uniform(0.0, longest))
        assert child.pid is not None
        if child.is_alive():
            os.kill(child.pid, signal.SIGKILL)
        child.join()
        hits += child.exitcode == -signal.SIGKILL
    child = process(train_or_resume, config, str(run))
    child.join()
    assert child.exitcode == 0
    return hits


def test_kill_9_at_random_moments(tmp_path: Path) -> None:
    config = tiny(write_text(tmp_path / "text"), steps=12, every=2)
    began = time.monotonic()
    train(config, tmp_path / "whole")
    assert crash(config, tmp_path / "killed", 3, 0.8 * (time.monotonic() - began), random.Random(0)) > 0
    assert_same_end(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_kill_9_at_many_random_moments(tmp_path: Path, seed: int) -> None:
    config = tiny(write_text(tmp_path / "text"), steps=150, every=1, accumulation=1 + seed % 2, threads=1 + seed % 2)
    began = time.monotonic()
    child = process(train_or_resume, config, str(tmp_path / "whole"))
    child.join()
    assert crash(config, tmp_path / "killed", 40, 0.05 * (time.monotonic() - began), random.Random(seed)) > 15
    assert_same_end(tmp_path / "killed", tmp_path / "whole")
