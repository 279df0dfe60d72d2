"""`openk3 resume RUN`: go on with a run that was stopped, from its newest checkpoint, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from openk3.commands import _base
from openk3.errors import UserError

SUMMARY = "go on with a run that was stopped, bit for bit"
EXAMPLES = (
    "openk3 resume runs/book",
    "openk3 resume runs/book --steps 4000",
)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of `openk3 resume`."""

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run directory. Its config.toml is read again: what it says of optimizer, schedule and compute may be changed there."""
    steps: int | None = None
    """A new end of the run: steps in all, those done included."""
    minutes: float | None = None
    """A new end of the run: minutes in all, those gone included."""
    tokens: int | None = None
    """A new end of the run: tokens in all."""
    quiet: bool = False
    """Show warnings and the result only."""


def main(argv: list[str]) -> int:
    """Run the verb; returns the exit code."""
    arguments = _base.parse(Arguments, argv, verb="resume", description=SUMMARY, examples=EXAMPLES, markers=(tyro.conf.FlagCreatePairsOff,))
    if sum(end is not None for end in (arguments.steps, arguments.minutes, arguments.tokens)) > 1:
        raise UserError("give one of --steps, --minutes and --tokens: a run has one end")

    from openk3.commands.train import report
    from openk3.train.display import Display
    from openk3.train.loop import resume

    with Display(quiet=arguments.quiet) as display:
        result = resume(arguments.run, on_event=display, steps=arguments.steps, minutes=arguments.minutes, tokens=arguments.tokens)
    if result.loss is None and result.finished:
        print(
            f"{result.run} is finished: step {result.step:,}, {result.tokens:,} tokens; "
            "to train it further, give a later --steps or --minutes"
        )
        return 0
    return report(result)
