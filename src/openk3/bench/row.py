"""One figure of a benchmark and where it comes from; the file of rows that `openk3 bench --json` writes."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from openk3.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one (name, case, peer) measured.

    `ratio` says how many times better ours is than the peer, whichever way the unit points; null without a peer's figure.
    `limit_share` is the share of the physical limit that ours reaches, 0–1; null where no limit is stated. Raw samples are in `unit`.
    A contestant that failed has null values, and `detail["error"]` says what happened: failures stay in the table.
    """

    name: str
    case: str
    ours: float | None
    unit: str
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None
    limit_share: float | None = None
    # Where the figure comes from.
    date: str
    version: str  # of ours
    commit: str
    machine: dict[str, Any]
    threads: int
    command: str
    phase: str  # "prefill", "decode" or "training"
    context: int  # tokens
    batch: int  # sequences
    precision: str
    baseline: str = ""
    baseline_version: str = ""
    baseline_tuned: bool | None = None  # for this work, on this kind of machine; null without a baseline
    baseline_note: str = ""
    runs: int
    scope: str  # "op" (one op) or "end-to-end"
    samples: list[float] = field(default_factory=list)
    peer_samples: list[float] = field(default_factory=list)
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> str | None:
        """What went wrong, in one line; None when the row is whole."""
        error = self.detail.get("error")
        return None if error is None else str(error)


def median(samples: Sequence[float]) -> float | None:
    """The median; None when there is no sample."""
    return statistics.median(samples) if samples else None


def times_better(ours: float | None, peer: float | None, *, lower_is_better: bool) -> float | None:
    """How many times better `ours` is than `peer`; None unless both are there and the answer is finite."""
    if ours is None or peer is None or ours <= 0 or peer <= 0:
        return None
    ratio = peer / ours if lower_is_better else ours / peer
    return ratio if math.isfinite(ratio) else None


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write `rows` to `path` as one JSON array, all of it or nothing."""
    seen: set[tuple[str, str, str]] = set()
    for row in rows:
        key = (row.name, row.case, row.peer)
        if key in seen:
            raise ValueError(f"two rows for {key}")
        seen.add(key)
    text = json.dumps([asdict(row) for row in rows], indent=1, allow_nan=False) + "\n"
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def check_writable(path: Path) -> None:
    """Raise UserError now if `path` cannot be written later, after minutes of measuring."""
    folder = path.resolve().parent
    if path.is_dir():
        raise UserError(f"--json {path}: a directory; name a file")
    if not folder.is_dir():
        raise UserError(f"--json {path}: {folder} does not exist; make it first")
    if not os.access(folder, os.W_OK):
        raise UserError(f"--json {path}: no permission to write in {folder}")
