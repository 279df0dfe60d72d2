"""`openk3 eval CHECKPOINT TEXT…`: how well a model predicts texts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from openk3.commands import _base
from openk3.errors import UserError

if TYPE_CHECKING:
    from openk3.train.evaluate import Evaluation

SUMMARY = "loss and bits per byte of a checkpoint on texts"
EXAMPLES = (
    "openk3 eval runs/book other.txt",
    "openk3 eval runs/book a.txt b.txt --context 4096 --json",
)
DEFAULT_CONTEXT = 2048


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of `openk3 eval`."""

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """A checkpoint directory, or a run directory (its newest checkpoint)."""
    texts: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT ...")]
    """Text files and directories; each is a row of the table."""
    context: int | None = None
    """Longer documents are cut into pieces of so many tokens. None: as the run was trained, or 2048."""
    json: bool = False
    """Print one JSON object instead of a table."""
    dtype: Literal["stored", "float32", "bfloat16", "float64"] = "stored"
    """Precision of the weights."""


def main(argv: list[str]) -> int:
    """Run the verb; returns the exit code."""
    arguments = _base.parse(Arguments, argv, verb="eval", description=SUMMARY, examples=EXAMPLES, markers=(tyro.conf.FlagCreatePairsOff,))
    if not arguments.texts:
        raise UserError("no text was named: give files or directories to evaluate on")
    if arguments.context is not None and arguments.context < 1:
        raise UserError(f"--context is {arguments.context}: it must be 1 or more")

    import torch

    from openk3.checkpoint.load import load, locate
    from openk3.train.evaluate import Evaluation, evaluate_texts
    from openk3.train.prepare import check_pair, tokenizer_of

    checkpoint = locate(arguments.checkpoint)
    tokenizer = tokenizer_of(checkpoint)
    model = load(checkpoint, dtype=None if arguments.dtype == "stored" else getattr(torch, arguments.dtype))
    check_pair(model.config, tokenizer, str(checkpoint))
    context = arguments.context or _trained_context(checkpoint)
    rows = list(evaluate_texts(model, tokenizer, arguments.texts, context=context))
    total = sum((result for _, result in rows), Evaluation(0.0, 0, 0))
    if arguments.json:
        print(
            json.dumps(
                {
                    "checkpoint": str(checkpoint),
                    "context": context,
                    "texts": [_as_json(*row) for row in rows],
                    "total": _as_json("total", total),
                }
            )
        )
    else:
        _show(checkpoint, context, rows, total)
    return 0


def _trained_context(checkpoint: Path) -> int:
    """The sequence length of the run that `checkpoint` lies in."""
    from openk3.train.config import TrainConfig

    settings = checkpoint.parent.parent / "config.toml"
    return TrainConfig.from_toml(settings).data.sequence_length if settings.is_file() else DEFAULT_CONTEXT


def _as_json(name: str, result: Evaluation) -> dict[str, Any]:
    return {
        "text": name,
        "documents": result.documents,
        "bytes": result.bytes,
        "tokens": result.tokens,
        "loss": result.loss,
        "perplexity": result.perplexity,
        "bits_per_byte": result.bits_per_byte,
    }


def _show(checkpoint: Path, context: int, rows: list[tuple[str, Evaluation]], total: Evaluation) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{checkpoint}, context {context:,} tokens", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("text", overflow="fold")
    for name in ("documents", "bytes", "tokens", "loss", "perplexity", "bits/byte"):
        table.add_column(name, justify="right")
    shown = [*rows, ("total", total)] if len(rows) > 1 else rows
    for name, one in shown:
        table.add_row(
            name,
            f"{one.documents:,}",
            f"{one.bytes:,}",
            f"{one.tokens:,}",
            f"{one.loss:.4f}",
            f"{one.perplexity:,.2f}",
            f"{one.bits_per_byte:.4f}",
        )
    Console(highlight=False).print(table)
