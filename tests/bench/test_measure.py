"""`openk3 bench kda` from the command line to the file of rows, at small sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from openk3.bench import kda
from openk3.commands import bench


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_kda_benchmark_writes_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kda, "TOKENS", 128)
    monkeypatch.setattr(kda, "FLAT", (64, 128))
    path = tmp_path / "bench.json"
    assert bench.main(["kda", "--threads", "1", "--runs", "2", "--device", "cpu", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    keys = [(row["name"], row["case"], row["peer"]) for row in rows]
    peers = ("transformers", "fla-naive")
    assert keys == [("kda", mode, peer) for mode in ("forward", "forward+backward") for peer in peers] + [("kda", "flat", "")]
    for row in rows:
        assert row["ours"] > 0 and row["runs"] == len(row["samples"]) == 2
        assert row["ratio"] is None or math.isfinite(row["ratio"])
        assert row["command"].startswith("openk3 bench kda --threads 1")
    for row in rows[:-1]:
        assert 0 < row["limit_share"] < 1 and row["detail"]["profile"]
        if row["peer_value"] is None:
            assert "make setup-bench" in row["detail"]["error"] and row["ratio"] is None
        else:
            assert row["detail"]["largest_difference"] < 1e-4 and row["baseline_tuned"] is False
    assert "forward+backward" in capsys.readouterr().out
