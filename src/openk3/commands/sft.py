"""`openk3 sft CONVERSATIONS… --from RUN --out RUN2`: supervised fine-tuning on conversations, with quantization-aware training."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from openk3.commands import _base
from openk3.commands.train import file_settings, report
from openk3.errors import UserError
from openk3.train.config import QuantizationSettings, TrainConfig

SUMMARY = "fine-tune on conversations; routed experts learn to be MXFP4 on the way"
EXAMPLES = (
    "openk3 sft chats.jsonl --from runs/demo --out runs/chat --steps 300",
    "openk3 sft chats.jsonl --from runs/demo --out runs/long --minutes 10",
    "openk3 convert runs/chat exported --to mxfp4",
)
DESCRIPTION = (
    f'{SUMMARY}. Each line of a file holds {{"messages": [...]}} in the OpenAI shape (also "tools", "thinking"); only what the '
    "assistant wrote is learned. For continued training on plain text with the same rounding: openk3 train --from … "
    "--quantization.experts mxfp4."
)
_QUANTIZED = QuantizationSettings(experts="mxfp4")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of `openk3 sft`."""

    conversations: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="CHATS ...")] = ()
    """JSONL files of conversations, also as .gz or .zst."""
    out: str | None = None
    """The run directory to make."""
    config: str | None = None
    """A TOML file with settings. Flags win over it."""
    quiet: bool = False
    """Show warnings and the result only."""
    settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    """All settings, by section."""


def main(argv: list[str]) -> int:
    """Run the verb; returns the exit code."""
    settings, named = file_settings(argv)
    if not named:
        settings = dataclasses.replace(settings, quantization=_QUANTIZED)
    arguments = _base.parse(
        Arguments,
        argv,
        verb="sft",
        description=DESCRIPTION,
        examples=EXAMPLES,
        default=Arguments(settings=settings),
        markers=(tyro.conf.FlagCreatePairsOff,),
    )
    if arguments.out is None:
        raise UserError("where to put the run is not said: give --out DIRECTORY")
    if arguments.settings.start_from is None:
        raise UserError("fine-tuning starts from a trained model: give --from CHECKPOINT (or a run directory)")
    data = dataclasses.replace(
        arguments.settings.data, kind="conversations", paths=arguments.conversations or arguments.settings.data.paths
    )
    settings = dataclasses.replace(arguments.settings, data=data)

    from openk3.train.display import Display
    from openk3.train.loop import train

    with Display(quiet=arguments.quiet) as display:
        result = train(settings, arguments.out, on_event=display)
    return report(result)
