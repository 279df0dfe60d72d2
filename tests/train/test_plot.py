"""The picture of a run: its figures, and that it appears whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from openk3.train.plot import draw, smooth
from openk3.train.run import Metrics


def write(path: Path, rows: int, **changes: Any) -> None:
    metrics = Metrics(path)
    for step in range(1, rows + 1):
        row = {"step": step, "loss": 5.0 / step, "heldout": 1.0 if step % 2 == 0 else None, "tokens": step, "seconds": 0.1 * step}
        row |= {"tokens_per_second": 100.0, "balance": {"max_violation": 0.5, "utilisation": 1.0}}
        metrics.append(row | changes)
    metrics.close()


@pytest.mark.parametrize("changes", [{}, {"balance": None}, {"heldout": None}])
@pytest.mark.parametrize("rows", [1, 5])
def test_it_draws(tmp_path: Path, rows: int, changes: dict[str, Any]) -> None:
    write(tmp_path / "metrics.jsonl", rows, **changes)
    draw(tmp_path / "metrics.jsonl", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert {entry.name for entry in tmp_path.iterdir()} == {"metrics.jsonl", "plot.png"}


def test_a_step_that_stopped_the_run_has_no_point(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.append({"step": 1, "stopped": "the loss is nan"})
    metrics.close()
    draw(tmp_path / "metrics.jsonl", tmp_path / "plot.png")
    draw(tmp_path / "none.jsonl", tmp_path / "plot.png")
    assert not (tmp_path / "plot.png").exists()


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "metrics.jsonl", 2)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        draw(tmp_path / "metrics.jsonl", tmp_path / "plot.png")
    assert {entry.name for entry in tmp_path.iterdir()} == {"metrics.jsonl"}


def test_smoothing_weighs_all_that_came_before() -> None:
    assert smooth([4.0]) == pytest.approx([4.0])
    assert smooth([1.0, 3.0], decay=0.5) == pytest.approx([1.0, (0.5 * 1 + 3) / 1.5])
    assert smooth([2.0] * 50) == pytest.approx([2.0] * 50)
