"""Where runs end, and the learning rate on the way."""

from __future__ import annotations

import pytest

from openk3.errors import UserError
from openk3.train.config import ScheduleSettings
from openk3.train.horizon import Horizon
from openk3.train.schedule import cosine_schedule


def test_steps() -> None:
    horizon = Horizon.of(ScheduleSettings(steps=200, warmup=0.05, final=0.2), 64)
    assert [horizon.lr_scale(step, 1e9) for step in (0, 9, 10, 199)] == [cosine_schedule(step, 200, 0.05, 0.2) for step in (0, 9, 10, 199)]
    assert (horizon.reached(199, 1e9), horizon.reached(200, 0.0)) == (False, True)
    assert horizon.share(50, 0.0) == 0.25 and horizon.eta(150, 0.0, 2.0) == 100.0


def test_tokens_are_rounded_up_to_steps() -> None:
    assert [Horizon.of(ScheduleSettings(tokens=tokens), 64).steps for tokens in (1, 64, 65, 640)] == [1, 1, 2, 10]


def test_the_clock() -> None:
    horizon = Horizon.of(ScheduleSettings(minutes=2.0), 64)
    assert horizon.steps is None and horizon.seconds == 120.0
    assert horizon.lr_scale(5, 60.6) == pytest.approx(0.55, abs=1e-3)  # half way after the 1 % of warm-up: (1 + 0.1) / 2
    assert horizon.lr_scale(9999, 120.0) == pytest.approx(0.1)
    assert (horizon.reached(10**6, 119.9), horizon.reached(0, 120.0)) == (False, True)
    assert horizon.share(3, 30.0) == 0.25 and horizon.share(3, 500.0) == 1.0
    assert (horizon.eta(3, 30.0, 7.0), horizon.eta(3, 500.0, 7.0)) == (90.0, 0.0)


def test_without_an_end() -> None:
    with pytest.raises(UserError, match="give --steps, --minutes or --tokens"):
        Horizon.of(ScheduleSettings(), 64)
