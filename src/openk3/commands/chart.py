"""A line chart out of characters: braille dots for curves, one character a point for the rest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

_BRAILLE = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot in a braille cell, by row and column: 2 dots wide, 4 high."""


@dataclass(frozen=True)
class Series:
    """Points (x, y) under one label; drawn as a curve of dots, or with `marker` at each point."""

    label: str
    points: Sequence[tuple[float, float]]
    style: str
    marker: str | None = None


def chart(series: Sequence[Series], *, width: int, height: int, x_name: str) -> Text:
    """The series in one frame of `width` × `height` characters, axes and legend included.

    Points that are not finite are left out; without any point the result says so.
    """
    kept = [Series(one.label, [p for p in one.points if all(map(math.isfinite, p))], one.style, one.marker) for one in series]
    points = [point for one in kept for point in one.points]
    if not points:
        return Text("(nothing to draw yet)", style="dim")
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = min(y for _, y in points), max(y for _, y in points)
    labels = [f"{value:.2f}" for value in (high, low)]
    gutter = max(map(len, labels))
    columns, rows = max(width - gutter - 2, 2), max(height - 3, 2)
    cells: list[list[tuple[int | str, str]]] = [[(_BRAILLE, "") for _ in range(columns)] for _ in range(rows)]

    def place(x: float, y: float, across: int, down: int) -> tuple[int, int]:
        column = round((x - left) / (right - left or 1.0) * (across - 1))
        row = round((high - y) / (high - low or 1.0) * (down - 1))
        return column, row

    for one in kept:
        dots = [place(x, y, columns * 2, rows * 4) for x, y in one.points]
        for column, row in [] if one.marker else _joined(dots):
            value, _ = cells[row // 4][column // 2]
            bits = value if isinstance(value, int) else _BRAILLE
            cells[row // 4][column // 2] = (bits | _DOTS[row % 4][column % 2], one.style)
    for one in kept:
        for x, y in one.points if one.marker else ():
            column, row = place(x, y, columns, rows)
            cells[row][column] = (one.marker or "", one.style)

    text = Text()
    for number, line in enumerate(cells):
        label = labels[0] if number == 0 else labels[1] if number == rows - 1 else ""
        text.append(f"{label:>{gutter}} ", style="dim").append("│" if not label else "┤", style="dim")
        for value, style in line:
            text.append(" " if value == _BRAILLE else chr(value) if isinstance(value, int) else value, style=style)
        text.append("\n")
    text.append(" " * (gutter + 1) + "└" + "─" * columns + "\n", style="dim")
    ends = f"{left:,.0f}", f"{right:,.0f} {x_name}"
    text.append(" " * (gutter + 2) + ends[0] + ends[1].rjust(columns - len(ends[0])) + "\n", style="dim")
    text.append(" " * (gutter + 2))
    for one in kept:
        text.append((one.marker or "⠒⠒") + " ", style=one.style).append(f"{one.label}   ")
    return text


def _joined(dots: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The dots and those on straight lines between neighbours."""
    line = list(dots[:1])
    for (x0, y0), (x1, y1) in itertools.pairwise(dots):
        steps = max(abs(x1 - x0), abs(y1 - y0), 1)
        line += [(round(x0 + (x1 - x0) * i / steps), round(y0 + (y1 - y0) * i / steps)) for i in range(1, steps + 1)]
    return line
