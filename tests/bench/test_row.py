"""Rows: which way a ratio points, what a failure leaves behind, the file of rows, the table."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from openk3.bench.contestant import PeerMissing, Spec, require
from openk3.bench.race import Lane
from openk3.bench.row import Row, times_better, write_rows
from openk3.bench.session import Peer, Session
from openk3.bench.table import show

# Rule 6 of the house: what a figure has to say about itself.
PROVENANCE = {
    "date", "version", "commit", "machine", "threads", "command", "phase", "context", "batch", "precision", "baseline", "baseline_version",
    "baseline_tuned", "runs", "scope", "samples", "peer_samples",
}
VALUES = {"name", "case", "ours", "unit", "peer", "peer_value", "ratio", "limit_share", "detail"}


def make(samples: list[float], lane: Lane | None, *, lower_is_better: bool = True, **changes: Any) -> Row:
    session = Session(command="openk3 bench kda", threads=2, console=Console(file=io.StringIO()))
    peer = Peer("transformers", Spec("none:none"), False, "a fallback") if lane is not None else None
    settings: dict[str, Any] = {
        "name": "kda", "case": "forward", "unit": "ms", "phase": "prefill", "context": 64, "batch": 1, "precision": "fp32", "scope": "op",
    }
    row = session.row(
        **{**settings, **changes}, samples=samples, peer=peer, peer_lane=lane, peer_samples=lane.seconds if lane else None,
        lower_is_better=lower_is_better,
    )
    assert isinstance(row, Row)
    return row


def test_a_ratio_says_how_many_times_better_ours_is() -> None:
    assert times_better(2.0, 8.0, lower_is_better=True) == 4.0
    assert times_better(8.0, 2.0, lower_is_better=False) == 4.0
    assert times_better(None, 2.0, lower_is_better=False) is None
    assert times_better(1e-300, 1e300, lower_is_better=True) is None


def test_a_row_holds_medians_samples_and_where_they_come_from() -> None:
    row = make([3.0, 1.0, 2.0], Lane(seconds=[10.0, 30.0, 20.0], version="transformers 5"))
    assert (row.ours, row.peer_value, row.ratio, row.runs) == (2.0, 20.0, 10.0, 3)
    assert (row.baseline, row.baseline_version, row.baseline_tuned, row.threads) == ("transformers", "transformers 5", False, 2)
    assert row.samples == [3.0, 1.0, 2.0] and row.error is None
    assert {f.name for f in dataclasses.fields(Row)} >= PROVENANCE | VALUES
    assert row.machine["cores"] >= 1 and row.machine["torch"] and len(row.date) >= 19 and row.commit


def test_without_a_peer_there_is_no_ratio() -> None:
    row = make([1.0], None)
    assert (row.peer, row.peer_value, row.ratio, row.baseline_tuned) == ("", None, None, None)


def test_failures_stay_in_the_table() -> None:
    missing = make([1.0], Lane(error="PeerMissing: transformers 5.24", missing=True))
    assert (missing.ours, missing.peer, missing.peer_value, missing.ratio) == (1.0, "transformers", None, None)
    assert missing.error == "transformers is not installed (make setup-bench): PeerMissing: transformers 5.24"
    both = make([], Lane(error="out of memory"), error="ours broke")
    assert both.ours is None and both.error == "ours broke; transformers failed: out of memory"


def test_the_file_is_one_array_that_json_can_hold(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    rows = [make([1.0], Lane(seconds=[2.0])), make([0.5], None, case="flat")]
    write_rows(rows, path)
    read = json.loads(path.read_text())
    assert [row["case"] for row in read] == ["forward", "flat"]
    assert all(isinstance(row["case"], str) and isinstance(row["peer"], str) for row in read)
    assert read[0]["ratio"] == 2.0 and read[1]["ratio"] is None
    assert list(tmp_path.iterdir()) == [path]


def test_two_rows_for_one_case_and_peer_are_refused(tmp_path: Path) -> None:
    row = make([1.0], None)
    with pytest.raises(ValueError, match="two rows"):
        write_rows([row, row], tmp_path / "bench.json")


def test_the_table_fits_80_columns_and_tells_failures_and_profile() -> None:
    profile = [{"op": "aten::bmm", "share": 0.61, "milliseconds": 1.0, "calls": 3}]
    peer = Lane(seconds=[1421.0], version="transformers 5.24")
    rows = [
        make([72.123], peer, case="forward+backward", limit_share=0.14, detail={"profile": profile}),
        make([1.0], Lane(error="PeerMissing: x", missing=True)),
        make([0.034], None, case="optimizer", unit="share"),
    ]
    out = io.StringIO()
    show(rows, Console(file=out, width=80))
    text = out.getvalue()
    assert all(len(line) <= 80 for line in text.splitlines())
    parts = (f"openk3 {rows[0].version} at", "failed", "make setup-bench", "a fallback", "bmm 61%")
    for part in (*parts, "forward+backward", "72.1 ms", "1421 ms", "19.7×", "14%", "3.4%"):
        assert part in " ".join(text.split()), part


def test_require_finds_a_version_or_names_what_is_missing() -> None:
    import torch

    assert require("torch", torch.__version__.split(".")[0]).startswith(torch.__version__.split("+")[0])
    with pytest.raises(PeerMissing, match=r"torch 1 \(version 2"):
        require("torch", "1")
    with pytest.raises(PeerMissing, match="no-such-peer 1.0"):
        require("no-such-peer", "1.0")
