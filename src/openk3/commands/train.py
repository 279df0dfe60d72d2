"""`openk3 train TEXT… --model nano --out RUN --steps 2000`: train a model on text, from scratch or from a checkpoint's weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from openk3.commands import _base
from openk3.errors import UserError
from openk3.train import toml_tree
from openk3.train.config import TrainConfig, with_overrides

if TYPE_CHECKING:
    from openk3.train.loop import RunResult

SUMMARY = "train a model on text, from scratch or from a checkpoint's weights"
EXAMPLES = (
    "openk3 train book.txt --model nano --out runs/book --steps 2000",
    "openk3 train src/ --model mini --out runs/code --minutes 60",
    "openk3 train new.jsonl.zst --from runs/book --out runs/next --tokens 500000",
    "openk3 train a.txt --set attn_res_block_size=none --out runs/p --steps 500",
)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of `openk3 train`."""

    texts: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="TEXT ...")] = ()
    """What to train on: text files, directories, .jsonl (with "text"), all of them also as .gz or .zst."""
    out: str | None = None
    """The run directory to make."""
    config: str | None = None
    """A TOML file with settings. Flags win over it."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Change a field of the model's config, as NAME=VALUE; may be given several times. VALUE none is null."""
    quiet: bool = False
    """Show warnings and the result only."""
    settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    """All settings, by section."""


def main(argv: list[str]) -> int:
    """Run the verb; returns the exit code."""
    arguments = _base.parse(
        Arguments,
        argv,
        verb="train",
        description=SUMMARY,
        examples=EXAMPLES,
        default=Arguments(settings=file_settings(argv)[0]),
        markers=(tyro.conf.FlagCreatePairsOff,),
    )
    if arguments.out is None:
        raise UserError("where to put the run is not said: give --out DIRECTORY")
    settings = with_overrides(arguments.settings, dict(map(assignment, arguments.set))) if arguments.set else arguments.settings
    if arguments.texts:
        settings = dataclasses.replace(settings, data=dataclasses.replace(settings.data, paths=arguments.texts))

    from openk3.train.display import Display
    from openk3.train.loop import train

    with Display(quiet=arguments.quiet) as display:
        result = train(settings, arguments.out, on_event=display)
    return report(result)


def file_settings(argv: Sequence[str]) -> tuple[TrainConfig, bool]:
    """The settings that hold unless a flag says otherwise: those of --config; and whether one was named."""
    for number, word in enumerate(argv):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if name == "--config" and (equals or number + 1 < len(argv)):
            return TrainConfig.from_toml(value if equals else argv[number + 1]), True
    return TrainConfig(), False


def assignment(text: str) -> tuple[str, Any]:
    """`NAME=VALUE` of the command line. Raises UserError for anything else."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UserError(f"--set {text}: it must be NAME=VALUE, such as --set hidden_size=256")
    return name, toml_tree.parse_value(value)


def report(result: RunResult) -> int:
    """Say on stdout how a run ended and what can be done with it; returns the exit code."""
    from openk3.train.display import duration

    figures = "" if result.loss is None else f", loss {result.loss:.4f}"
    figures += "" if result.heldout is None else f", held out {result.heldout:.4f}"
    done = f"step {result.step:,}, {result.tokens:,} tokens, {duration(result.seconds)}{figures}"
    if not result.finished:
        print(f"stopped and saved at {done}\ngo on with: openk3 resume {result.run}")
        return 128 + (result.signal or 0)
    print(f'done: {done}\n{_inventory(result.run)}\ntry: openk3 generate {result.run} --prompt "…"')
    return 0


def _inventory(run: Path) -> str:
    return f"in {run}: checkpoints/, metrics.jsonl, plot.png, config.toml, tokenizer.json"
