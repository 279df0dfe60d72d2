"""What the demo shows at its end: the curve, what the model writes, memory by system, balance, what to try next. Fits a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from openk3 import accounting
from openk3.commands.chart import Series, chart
from openk3.config import ModelConfig

_SYSTEMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Kimi Delta Attention", ("kda",)),
    ("Gated MLA", ("mla",)),
    ("Stable LatentMoE", ("router", "routed_experts", "shared_experts", "latent")),
    ("Attention Residuals", ("attn_res",)),
    ("embedding and head", ("embedding", "head")),
    ("dense MLP, norms", ("dense_mlp", "norms")),
)
_CURVE_HEIGHT = 11
_SMOOTHING = 0.9


@dataclass(frozen=True)
class Sample:
    """A prompt and how the model went on."""

    prompt: str
    text: str


@dataclass(frozen=True)
class Findings:
    """All that the summary is made of."""

    run: Path
    config: ModelConfig
    rows: Sequence[dict[str, Any]]
    """Of `metrics.jsonl`."""
    heldout: float | None
    """Nats a token, over the whole held-out part."""
    bits_per_byte: float | None
    samples: Sequence[Sample]
    decode_rate: float
    """Tokens a second, all samples together."""


def summary(found: Findings, width: int) -> RenderableType:
    """The whole of it, `width` characters wide."""
    return Group(
        _headline(found),
        Text(),
        _curve(found, width),
        Text(),
        _samples(found, width),
        Text(),
        _memory(found.config),
        _balance(found.rows),
        Text(),
        _next(found.run),
    )


def smoothed(values: Sequence[float], decay: float = _SMOOTHING) -> list[float]:
    """Exponential moving average, unbiased from the first value on."""
    result, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = decay * total + (1 - decay) * value, decay * weight + (1 - decay)
        result.append(total / weight)
    return result


def memory_rows(config: ModelConfig) -> list[tuple[str, str, str, str]]:
    """For each system: its name, parameters, those a token uses, and what a sequence keeps there (weights and state in fp32)."""
    stored, active = accounting.parameter_counts(config), accounting.active_counts(config)
    kda = accounting.kda_state_bytes(config) + accounting.conv_tail_bytes(config, "fp32")
    keeps = {
        "kda": f"{_bytes(kda)}, however long it is",
        "mla": f"{_bytes(accounting.latent_bytes_per_token(config, 'fp32'))} a token",
    }
    rows = []
    for name, systems in _SYSTEMS:
        held = sum(stored[system] for system in systems)
        if held:
            rows.append((name, f"{held:,}", f"{sum(active[system] for system in systems):,}", keeps.get(systems[0], "nothing")))
    total, used = sum(stored.values()), sum(active.values())
    return [*rows, ("all", f"{total:,}", f"{used:,}", f"{_bytes(accounting.state_bytes(config, [1000], 'fp32'))} at 1,000 tokens")]


def _headline(found: Findings) -> Text:
    last = found.rows[-1] if found.rows else {}
    text = Text.assemble(("A Kimi K3 of your own. ", "bold"))
    seconds = float(last.get("seconds") or 0.0)
    text.append(f"{last.get('tokens', 0):,} tokens in {int(seconds) // 60}:{int(seconds) % 60:02d}")
    if seconds:
        text.append(f" ({last.get('tokens', 0) / seconds:,.0f} a second)")
    if found.heldout is not None:
        text.append(f"; held-out loss {found.heldout:.3f}")
    if found.bits_per_byte is not None:
        text.append(f", {found.bits_per_byte:.2f} bits a byte")
    return text


def _curve(found: Findings, width: int) -> Group:
    rows = [row for row in found.rows if row.get("loss") is not None]
    losses = smoothed([float(row["loss"]) for row in rows])
    drawn = chart(
        [
            Series("loss, nats a token", [(float(row["tokens"]), loss) for row, loss in zip(rows, losses, strict=True)], "cyan"),
            Series(
                "held out", [(float(row["tokens"]), float(row["heldout"])) for row in rows if row.get("heldout") is not None], "yellow", "●"
            ),
        ],
        width=min(width, 100),
        height=_CURVE_HEIGHT,
        x_name="tokens",
    )
    return Group(drawn, Text(f"with balance and speed: {found.run / 'plot.png'}", style="dim"))


def _samples(found: Findings, width: int) -> Panel:
    parts: list[RenderableType] = []
    for sample in found.samples:
        # What the model was given shows in the gutter's colour of a comment-free line: the code speaks for itself.
        code = (sample.prompt + sample.text).rstrip().expandtabs(4)
        parts += [Syntax(code, "python", theme="ansi_dark", background_color="default", word_wrap=True), Text()]
    prompts = ", ".join(repr(sample.prompt) for sample in found.samples)
    title = f"what it writes after {prompts} ({found.decode_rate:,.0f} tokens/s)"
    return Panel(Group(*parts[:-1]), title=title, title_align="left", border_style="dim", box=box.ROUNDED, width=min(width, 100))


def _memory(config: ModelConfig) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, title="memory by system", title_justify="left", title_style="bold", pad_edge=False, padding=(0, 2, 0, 0)
    )
    table.add_column("system")
    table.add_column("parameters", justify="right")
    table.add_column("a token uses", justify="right")
    table.add_column("a sequence keeps")
    rows = memory_rows(config)
    for row in rows:
        table.add_row(*row, end_section=row is rows[-2])
    return table


def _balance(rows: Sequence[dict[str, Any]]) -> Text:
    balances = [row["balance"] for row in rows if isinstance(row.get("balance"), dict)]
    if not balances:
        return Text("expert load: this model has no experts", style="dim")
    last = balances[-max(1, len(balances) // 10) :]
    mean = sum(one["mean_violation"] for one in last) / len(last)
    used = sum(one["utilisation"] for one in last) / len(last)
    return Text.assemble(
        ("expert load: ", "bold"),
        f"the busiest expert of a layer has {mean:+.0%} over the mean, {used:.0%} of the experts are used (last tenth of the run)",
    )


def _next(run: Path) -> Group:
    commands = (
        (f'openk3 generate {run} --prompt "class Stack:"', "let it write"),
        (f"openk3 resume {run} --minutes 30", "train it further"),
        (f"openk3 eval {run} FILE.py", "how well it knows a text of yours"),
        ("openk3 train FOLDER --out runs/mine --minutes 10", "train one on your own text"),
        ("openk3 --help", "everything else"),
    )
    lines = Table.grid(padding=(0, 3))
    for command, what in commands:
        lines.add_row(Text(command, style="cyan"), Text(what, style="dim"))
    return Group(Text("what to try next", style="bold"), lines)


def _bytes(count: int) -> str:
    return f"{count:,} B" if count < 10_000 else f"{count / 1024:,.0f} KiB" if count < 10 * 1024**2 else f"{count / 1024**2:,.0f} MiB"
