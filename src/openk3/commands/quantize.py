"""`openk3 quantize SRC DST`: post-training quantization, to compare with training that knew about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from openk3.commands import _base

SUMMARY = "post-training quantization: round the routed experts to MXFP4 without any training"
EXAMPLES = (
    "openk3 quantize runs/demo exported-ptq",
    "openk3 quantize runs/demo exported-floor --scale-rule floor",
)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of `openk3 quantize`."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A checkpoint directory with plain experts, or a run directory (its newest checkpoint)."""
    destination: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DESTINATION")]
    """A new directory."""
    scale_rule: Literal["even", "floor", "ceil"] = "even"
    """Which power of two a block of 32 weights gets: even (what compressed-tensors writes), floor (OCP), ceil (nothing saturates)."""
    activations: Literal["mxfp8", "none"] = "mxfp8"
    """Format in which experts will read their inputs, recorded in the config and obeyed when the checkpoint runs."""


def main(argv: list[str]) -> int:
    """Run the verb; returns the exit code."""
    arguments = _base.parse(Arguments, argv, verb="quantize", description=SUMMARY, examples=EXAMPLES)
    from openk3.checkpoint.convert import convert
    from openk3.commands.progress import bytes_progress

    with bytes_progress("writing") as progress:
        done = convert(
            arguments.source,
            arguments.destination,
            "mxfp4",
            scale_rule=arguments.scale_rule,
            inputs=arguments.activations,
            progress=progress,
        )
    if not done.packed:
        print("note: the experts of the source were packed already and passed through untouched")
    print(f"{done.directory}: {done.packed:,} matrices rounded to MXFP4 by the rule {arguments.scale_rule}, inputs {arguments.activations}")
    print(f"try: openk3 eval {done.directory} TEXT")
    return 0
