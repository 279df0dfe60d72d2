"""A picture of a run: loss, balance of the experts, throughput."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openk3.train.run import TEMPORARY, Metrics


def draw(metrics: Path, target: Path) -> None:
    """Draw the rows of `metrics` into the PNG `target`, which appears whole or not at all. Nothing to draw: no picture. Raises OSError."""
    rows = [row for row in Metrics.read(metrics) if row.get("loss") is not None]
    if not rows:
        return
    # The figure is drawn without pyplot, which would keep it for ever and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(9, 8), dpi=110)
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.09, right=0.98, top=0.95, bottom=0.07, hspace=0.12)
    loss, balance, speed = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1.5, 1.5])
    losses = [row["loss"] for row in rows]
    loss.plot(steps, losses, color="0.75", linewidth=0.8, label="step")
    loss.plot(steps, smooth(losses), color="tab:blue", label="smoothed")
    heldout = [(row["step"], row["heldout"]) for row in rows if row.get("heldout") is not None]
    if heldout:
        loss.plot(*zip(*heldout, strict=True), color="tab:orange", marker="o", markersize=3, label="held out")
    loss.set_ylabel("loss (nats a token)")
    loss.legend(frameon=False)
    loss.set_title(f"{metrics.resolve().parent.name}: {rows[-1]['tokens']:,} tokens, {rows[-1]['seconds'] / 60:.1f} minutes", fontsize=10)
    violations, used = _balance(rows, "max_violation"), _balance(rows, "utilisation")
    if violations:
        balance.plot(*zip(*violations, strict=True), color="tab:red", linewidth=0.9, label="busiest expert over the mean, less 1")
        balance.plot(*zip(*used, strict=True), color="tab:green", linewidth=0.9, label="experts used (share)")
        balance.set_ylim(bottom=0)
        balance.legend(frameon=False, fontsize=8)
    else:
        balance.text(0.5, 0.5, "no experts", ha="center", va="center", transform=balance.transAxes, color="0.5")
    balance.set_ylabel("expert load")
    speed.plot(steps, [row["tokens_per_second"] for row in rows], color="tab:purple", linewidth=0.9)
    speed.set_ylabel("tokens / s")
    speed.set_ylim(bottom=0)
    speed.set_xlabel("step")
    for axes in (loss, balance, speed):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    temporary = target.with_name(f"{TEMPORARY}{target.name}")
    try:
        figure.savefig(temporary, format="png")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def smooth(values: Sequence[float], decay: float = 0.95) -> list[float]:
    """Exponential moving average with weights `decay`ⁿ that sum to 1 from the first value on."""
    result: list[float] = []
    total = weight = 0.0
    for value in values:
        total = decay * total + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        result.append(total / weight)
    return result


def _balance(rows: Sequence[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    return [
        (row["step"], row["balance"][key]) for row in rows if isinstance(row.get("balance"), dict) and row["balance"].get(key) is not None
    ]
