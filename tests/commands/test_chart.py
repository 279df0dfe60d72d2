"""Charts of characters: where points land."""

from __future__ import annotations

import pytest

from openk3.commands.chart import Series, chart


def lines(*series: Series, width: int = 40, height: int = 10) -> list[str]:
    return chart(series, width=width, height=height, x_name="tokens").plain.split("\n")


def test_frame_has_the_asked_size_and_the_ends_of_both_axes() -> None:
    drawn = lines(Series("loss", [(0, 8.0), (1500, 2.5)], ""))
    assert len(drawn) == 10
    assert max(map(len, drawn[:9])) == 40
    assert drawn[0].startswith("8.00 ┤") and drawn[6].startswith("2.50 ┤")
    assert drawn[8].split() == ["0", "1,500", "tokens"]
    assert "loss" in drawn[9]


def test_markers_land_at_the_corners_they_belong_to() -> None:
    drawn = lines(Series("held-out", [(0, 4.0), (10, 1.0)], "", "●"))
    assert drawn[0][6] == "●" and drawn[6][39] == "●"
    assert sum(line.count("●") for line in drawn[:7]) == 2


def test_curve_joins_its_points() -> None:
    drawn = lines(Series("loss", [(0, 1.0), (10, 0.0)], ""))
    assert all(any(ord(c) > 0x2800 for c in line) for line in drawn[:7])
    assert drawn[0][6] == chr(0x2800 | 0x01 | 0x10) or ord(drawn[0][6]) & 0x01


@pytest.mark.parametrize("points", [[], [(1.0, float("nan"))], [(float("inf"), 2.0)]])
def test_without_a_point_it_says_so(points: list[tuple[float, float]]) -> None:
    assert lines(Series("loss", points, "")) == ["(nothing to draw yet)"]


def test_one_point_and_flat_lines_are_drawn() -> None:
    assert any("●" in line for line in lines(Series("a", [(5, 2.0)], "", "●")))
    flat = lines(Series("a", [(0, 2.0), (9, 2.0)], ""))
    assert sum(any(ord(c) > 0x2800 for c in line) for line in flat[:7]) == 1
