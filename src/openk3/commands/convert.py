"""`openk3 convert SRC DST --to bf16|mxfp4`: a run or a release in another precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from openk3.commands import _base

SUMMARY = "write a run or a release in another precision, in the release's layout"
EXAMPLES = (
    "openk3 convert runs/demo exported --to mxfp4",
    "openk3 convert path/to/release unpacked --to bf16",
)


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of `openk3 convert`."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A checkpoint directory in either precision, or a run directory (its newest checkpoint)."""
    destination: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DESTINATION")]
    """A new directory."""
    to: Literal["bf16", "mxfp4"]
    """mxfp4: routed experts packed (packed ones pass through untouched). bf16: unpacked, everything in bfloat16."""
    trunk: Literal["keep", "bf16", "fp32"] = "keep"
    """With mxfp4: the dtype of everything but the routed experts. keep leaves it as it is stored."""
    shard_gigabytes: float = 5.0
    """Largest file, in 10^9 bytes."""


def main(argv: list[str]) -> int:
    """Run the verb; returns the exit code."""
    arguments = _base.parse(Arguments, argv, verb="convert", description=SUMMARY, examples=EXAMPLES)
    from openk3.checkpoint.convert import convert
    from openk3.commands.progress import bytes_progress
    from openk3.errors import UserError

    if not arguments.shard_gigabytes > 0:
        raise UserError(f"--shard-gigabytes is {arguments.shard_gigabytes}: it must be above 0")
    with bytes_progress("writing") as progress:
        done = convert(
            arguments.source,
            arguments.destination,
            arguments.to,
            trunk=arguments.trunk,
            shard_bytes=int(arguments.shard_gigabytes * 1e9),
            progress=progress,
        )
    print(
        f"{done.directory}: {done.tensors:,} tensors, {done.nbytes:,} bytes; {done.packed:,} matrices packed, {done.unpacked:,} unpacked, "
        f"{done.passed:,} tensors passed through untouched"
    )
    print(f"try: openk3 inspect {done.directory} --deep")
    return 0
