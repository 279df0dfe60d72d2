"""The learning rate's schedule."""

from __future__ import annotations

import math

import pytest

from openk3.train.schedule import cosine_schedule


def test_warm_up_is_one_percent_and_linear() -> None:
    rates = [cosine_schedule(step, 1000) for step in range(12)]
    assert rates[:10] == pytest.approx([(step + 1) / 11 for step in range(10)])
    assert rates[10] == 1.0
    assert rates[11] < 1.0


def test_cosine_between_peak_and_minimum() -> None:
    assert cosine_schedule(0, 100, warmup_fraction=0.0, min_ratio=0.2) == 1.0
    assert cosine_schedule(50, 100, warmup_fraction=0.0, min_ratio=0.2) == pytest.approx(0.6)
    assert cosine_schedule(25, 100, warmup_fraction=0.0, min_ratio=0.2) == pytest.approx(0.2 + 0.8 * (0.5 + math.sqrt(0.5) / 2))
    assert cosine_schedule(100, 100, min_ratio=0.2) == pytest.approx(0.2)
    assert cosine_schedule(10**6, 100, min_ratio=0.2) == pytest.approx(0.2)


def test_constant_with_a_minimum_of_one() -> None:
    assert {cosine_schedule(step, 100, min_ratio=1.0) for step in range(1, 101)} == {1.0}


def test_warm_up_length_is_not_fooled_by_rounding() -> None:
    assert cosine_schedule(7, 100, warmup_fraction=0.07) == 1.0


@pytest.mark.parametrize("total", [1, 2, 3, 7, 100, 101])
def test_every_step_moves_and_none_overshoots(total: int) -> None:
    rates = [cosine_schedule(step, total, min_ratio=0.1) for step in range(total)]
    assert all(0.1 <= rate <= 1.0 for rate in rates)
    after = rates[math.ceil(total / 100) :]
    assert after == sorted(after, reverse=True)


@pytest.mark.parametrize(
    "arguments", [(-1, 10, 0.01, 0.1), (0, 0, 0.01, 0.1), (0, 10, 1.0, 0.1), (0, 10, -0.1, 0.1), (0, 10, 0.01, 1.5), (0, 10, math.nan, 0.1)]
)
def test_arguments_out_of_range_are_refused(arguments: tuple[int, int, float, float]) -> None:
    with pytest.raises(ValueError):
        cosine_schedule(*arguments)
