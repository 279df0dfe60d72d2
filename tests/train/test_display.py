"""What a person sees: plain lines off a terminal, a panel on one, only warnings when quiet."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from openk3.train.display import Display, balance_line, duration, sparkline
from openk3.train.events import Balance, Begun, Event, Notice, Saved, Step

BEGUN = Begun(Path("runs/x"), 3_300_000, 120_000, 2_000, 2**30, 2**33, 0, 200, None)
BALANCE = Balance({1: 0.25, 3: 1.0}, {1: 1.0, 3: 0.5}, {1: (5, 4, 4, 3), 3: (8, 8, 0, 0)})


def step(number: int, heldout: float | None = None) -> Step:
    return Step(number, number / 200, 6.0 - number / 100, heldout, 1e-3, 2.5, number * 64, 1234.5, BALANCE, number * 0.5, 90.0, 2**28, 0.1)


def shown(events: list[Event], *, terminal: bool, quiet: bool = False) -> str:
    out = io.StringIO()
    with Display(Console(file=out, force_terminal=terminal, width=160, highlight=False), quiet=quiet, every=1e9) as display:
        for event in events:
            display(event)
    return out.getvalue()


def test_plain_lines() -> None:
    events = [Notice("reading"), BEGUN, step(1), step(2), step(3, heldout=5.5), Saved(Path("runs/x/checkpoints/step-3"), 3, 0.25)]
    assert shown(events, terminal=False).splitlines() == [
        "reading",
        "runs/x: 3.3 M parameters, 120,000 tokens to learn from, 2,000 held out; 200 steps; memory about 1.0 GiB of 8.0 GiB",
        "step 1/200 (0.5%)  loss 5.9900  1,234 tokens/s  lr 1.00e-03  gradient 2.50  busiest expert +1.00, 75% used  1:30 to go",
        "step 3/200 (1.5%)  loss 5.9700  held out 5.5000  1,234 tokens/s  lr 1.00e-03  gradient 2.50  "
        "busiest expert +1.00, 75% used  1:30 to go",
        "saved runs/x/checkpoints/step-3 in 0.2 s",
    ]


def test_quiet_shows_warnings_only() -> None:
    events = [Notice("reading"), BEGUN, step(1), Notice("a checkpoint is damaged", warning=True), step(2, heldout=5.0)]
    for terminal in (False, True):
        assert "warning: a checkpoint is damaged" in shown(events, terminal=terminal, quiet=True)
        assert "reading" not in shown(events, terminal=terminal, quiet=True)


def test_the_panel() -> None:
    text = shown([BEGUN, step(50, heldout=5.25), step(100)], terminal=True)
    for part in ("50.0%", "step 100/200", "0:50 gone, 1:30 to go", "held out", "5.250", "1,234", "expert load", "+1.00", "256.0 MiB"):
        assert part in text, part


def test_the_panel_before_the_first_step() -> None:
    assert "preparing" in shown([], terminal=True) and "first step" in shown([BEGUN], terminal=True)


def test_the_load_is_that_of_the_worst_layer() -> None:
    assert (
        balance_line(BALANCE).plain == "expert load ██    busiest +1.00 (layer 3), mean +0.62, 75% used"
    )


def test_many_experts_share_bars() -> None:
    wide = Balance({0: 1.0}, {0: 1.0}, {0: tuple(range(1, 897))})
    assert len(balance_line(wide).plain.split("  busiest")[0]) == len("expert load ") + 28


def test_sparkline() -> None:
    assert sparkline([], 8) == "" and sparkline([2.0, 2.0], 8) == "▁▁"
    assert sparkline([3.0, 2.0, 1.0], 8) == "█▄▁"
    assert sparkline([float(n) for n in range(100)], 4) == "▁▃▅█"


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (245, "4:05"), (3723, "1:02:03")])
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
