"""A run as a person watches it: a live panel on a terminal, plain lines elsewhere.

with Display() as display:
    train(config, "runs/first", on_event=display)
"""

from __future__ import annotations

import time
from collections import deque
from itertools import pairwise
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from openk3.train.events import Balance, Begun, Event, Notice, Saved, Step
from openk3.train.memory import readable

_BARS = "▁▂▃▄▅▆▇█"
_CURVE = 48
"""Width of the little loss curve in characters."""


class Display:
    """Shows events as they come. Call it with each; it is a context manager that leaves the terminal as it was."""

    def __init__(self, console: Console | None = None, *, quiet: bool = False, every: float = 5.0) -> None:
        """`quiet` shows warnings only. Off a terminal a line is printed at most every `every` seconds, and at each held-out loss."""
        self.console = console if console is not None else Console(stderr=True, highlight=False)
        self.quiet = quiet
        self.every = every
        self.live: Live | None = None
        self.begun: Begun | None = None
        self.last: Step | None = None
        self.heldout: float | None = None
        self.losses: list[float] = []
        self._speeds: deque[float] = deque(maxlen=20)
        self._printed = -every

    def __enter__(self) -> Self:
        if self.console.is_terminal and not self.quiet:
            self.live = Live(console=self.console, get_renderable=self.render, refresh_per_second=4)
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, Notice):
            if event.warning or not self.quiet:
                text = Text(f"warning: {event.text}" if event.warning else event.text, style="yellow" if event.warning else "dim")
                self.console.print(text, soft_wrap=True)
        elif isinstance(event, Begun):
            self.begun = event
            self._say(describe(event))
        elif isinstance(event, Saved):
            if self.live is None:
                self._say(f"saved {event.path} in {event.seconds:.1f} s")
        else:
            self._step(event)

    def _step(self, event: Step) -> None:
        self.last = event
        self.losses.append(event.loss)
        self._speeds.append(event.tokens_per_second)
        if event.heldout is not None:
            self.heldout = event.heldout
        now = time.monotonic()
        if self.live is None and (event.heldout is not None or now - self._printed >= self.every):
            self._printed = now
            self._say(line(event, self.begun))

    def _say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(Text(text), soft_wrap=True)

    def render(self) -> RenderableType:
        """The live panel."""
        if self.last is None or self.begun is None:
            return Text("preparing …" if self.begun is None else "first step …", style="dim")
        step, speed = self.last, sum(self._speeds) / len(self._speeds)
        head = Table.grid(padding=(0, 1))
        head.add_row(
            ProgressBar(total=1.0, completed=step.share, width=24),
            f"{step.share:6.1%}",
            f"step {_of(step.step, self.begun.total_steps)}",
            f"{duration(step.seconds)} gone, {duration(step.eta)} to go",
        )
        body = Text("   ").join(
            [
                _pair("loss", f"{step.loss:.3f}", "cyan"),
                _pair("held out", "–" if self.heldout is None else f"{self.heldout:.3f}", "yellow"),
                _pair("tokens/s", f"{speed:,.0f}"),
                _pair("lr", f"{step.lr:.1e}"),
                _pair("gradient", f"{step.grad_norm:.2f}"),
                Text(readable(step.memory), style="dim"),
            ]
        )
        rows: list[RenderableType] = [head, body]
        if step.balance is not None:
            rows.append(balance_line(step.balance))
        rows.append(Text.assemble(("loss ", "dim"), (sparkline(self.losses, _CURVE), "cyan")))
        return Group(*rows)


def describe(begun: Begun) -> str:
    """What is about to happen, in a line."""
    end = f"{begun.total_steps:,} steps" if begun.total_steps is not None else duration(begun.total_seconds or 0.0)
    more = f", from step {begun.step:,} on" if begun.step else ""
    return (
        f"{begun.run}: {begun.parameters / 1e6:.1f} M parameters, {begun.train_tokens:,} tokens to learn from, "
        f"{begun.heldout_tokens:,} held out; {end}{more}; memory about {readable(begun.needed_bytes)} of {readable(begun.available_bytes)}"
    )


def line(event: Step, begun: Begun | None) -> str:
    """A step as a line of plain text."""
    parts = [
        f"step {_of(event.step, begun.total_steps if begun else None)} ({event.share:.1%})",
        f"loss {event.loss:.4f}",
        *([f"held out {event.heldout:.4f}"] if event.heldout is not None else []),
        f"{event.tokens_per_second:,.0f} tokens/s",
        f"lr {event.lr:.2e}",
        f"gradient {event.grad_norm:.2f}",
    ]
    if event.balance is not None:
        parts.append(f"busiest expert {event.balance.worst:+.2f}, {event.balance.used:.0%} used")
    return "  ".join([*parts, f"{duration(event.eta)} to go"])


def balance_line(balance: Balance, most: int = 28) -> Text:
    """The load of the worst layer's experts, a bar each (or one for some neighbours' busiest); how far the busiest is above the mean."""
    layer = max(balance.max_violation, key=lambda layer: balance.max_violation[layer])
    load = balance.load.get(layer, ())
    columns = min(most, len(load))
    edges = [len(load) * n // columns for n in range(columns + 1)] if columns else []
    heights = [max(load[a:b]) for a, b in pairwise(edges)]
    # Half height is the mean: an even load looks like a level line.
    mean = sum(load) / max(1, len(load))
    text = Text.assemble(("expert load ", "dim"))
    for height in heights:
        share = height / mean if mean else 0.0
        text.append(_BARS[min(7, int(share * 4))] if height else " ", style="green" if share < 1.5 else "yellow" if share < 3 else "red")
    return text.append(f"  busiest {balance.worst:+.2f} (layer {layer}), mean {balance.mean:+.2f}, {balance.used:.0%} used")


def sparkline(values: list[float], width: int) -> str:
    """The values, averaged into `width` columns, as bars between their least and their greatest."""
    if not values:
        return ""
    columns = min(width, len(values))
    edges = [len(values) * n // columns for n in range(columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join(_BARS[int((mean - low) / (high - low) * 7) if high > low else 0] for mean in means)


def duration(seconds: float) -> str:
    """`4:05`, or `1:02:03` from an hour on."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole // 60 % 60
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _pair(name: str, value: str, style: str = "bold") -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, style))


def _of(step: int, total: int | None) -> str:
    return f"{step:,}" if total is None else f"{step:,}/{total:,}"
