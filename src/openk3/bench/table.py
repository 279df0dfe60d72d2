"""The rows of a benchmark as a table for a terminal of 80 columns, with what went wrong and where the time goes below it."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from openk3.bench.row import Row

_OPS_SHOWN = 5


def show(rows: Sequence[Row], console: Console) -> None:
    """Print `rows`, one table for each benchmark, under a line that says what ran where."""
    for where in dict.fromkeys(_where(row) for row in rows):
        console.print(where, style="dim", highlight=False, markup=False)
    for name in dict.fromkeys(row.name for row in rows):
        members = [row for row in rows if row.name == name]
        console.print(_table(name, members))
        for line in _notes(members):
            console.print(line, style="dim", highlight=False, markup=False)


def _where(row: Row) -> str:
    on = row.machine["gpu"] or f"{row.machine['cpu']}, {row.machine['cores']} cores"
    told = f"openk3 {row.version} at {row.commit}, torch {row.machine['torch']}, {on}"
    # What other processes do to contestants that wait for each other's threads is more than their share of the cores.
    busy = row.machine["load"] > row.machine["cores"] / 2
    return told + (f"\nOther work was running (load {row.machine['load']}): the figures are worth little." if busy else "")


def _table(name: str, rows: Sequence[Row]) -> Table:
    first = rows[0]
    table = Table(title=f"{name}  ({first.precision}, {first.threads} threads)", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("case", no_wrap=True)
    table.add_column("ours", justify="right", no_wrap=True)
    table.add_column("peer", no_wrap=True)
    table.add_column("peer's", justify="right", no_wrap=True)
    table.add_column("better", justify="right", no_wrap=True)
    table.add_column("of limit", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.case,
            _value(row.ours, row.unit),
            row.peer or "–",
            _value(row.peer_value, row.unit) if row.peer else "",
            "–" if row.ratio is None else f"{row.ratio:.1f}×",
            "–" if row.limit_share is None else f"{row.limit_share:.0%}",
        )
    return table


def _value(value: float | None, unit: str) -> str:
    """A figure with three significant digits and a unit short enough for the table."""
    if value is None:
        return "failed"
    if unit == "share":
        return f"{value:.1%}"
    digits = f"{value:.0f}" if value >= 100 else f"{value:.3g}"
    return f"{digits} {unit}" if len(unit) <= 8 else digits


def _notes(rows: Sequence[Row]) -> list[str]:
    """What the table has no room for: errors, what the peers are, the ops that take most of the time."""
    notes = [f"{row.case}: {row.error}" for row in rows if row.error]
    notes += dict.fromkeys(f"{row.peer}, {row.baseline_version}: {row.baseline_note}" for row in rows if row.baseline_version)
    for case in dict.fromkeys(row.case for row in rows):
        profile = next((row.detail["profile"] for row in rows if row.case == case and row.detail.get("profile")), None)
        if profile:
            shares = ", ".join(f"{op['op'].removeprefix('aten::')} {op['share']:.0%}" for op in profile[:_OPS_SHOWN])
            notes.append(f"{case}, where ours spends its time: {shares}")
    return notes
