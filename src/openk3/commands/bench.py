"""`openk3 bench NAME`: measure openk3 beside its peers.

openk3 bench kda --threads 2 --json bench.json
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from openk3.commands._base import parse
from openk3.errors import UserError

SUMMARY = "time openk3 beside its peers, with where each number comes from"


@dataclass(frozen=True)
class Arguments:
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Which benchmark; `all` for every one, `list` to see them."""
    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the rows to this file too, as one JSON array."""
    threads: int = 2
    """Threads of each contestant."""
    runs: Annotated[int | None, tyro.conf.arg(metavar="INT")] = None
    """Timed runs of each contestant, instead of the benchmark's own number."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the work runs; auto takes a GPU when there is one."""


def main(argv: list[str]) -> int:
    """Measure what `argv` asks for; 0 when each of openk3's own figures was taken."""
    arguments = parse(
        Arguments,
        argv,
        verb="bench",
        description=SUMMARY[0].upper() + SUMMARY[1:] + ".",
        examples=("openk3 bench list", "openk3 bench kda", "openk3 bench all --json bench.json"),
    )
    for option in ("threads", "runs"):
        value = getattr(arguments, option)
        if value is not None and value < 1:
            raise UserError(f"--{option} {value}: at least 1")

    from openk3.bench.registry import BENCHMARKS
    from openk3.bench.row import Row, check_writable, write_rows
    from openk3.bench.session import Session, pick_device
    from openk3.bench.table import show

    console = Console()
    if arguments.name == "list":
        for name, benchmark in BENCHMARKS.items():
            print(f"{name:<8} {benchmark.summary}")
        return 0
    if arguments.name != "all" and arguments.name not in BENCHMARKS:
        raise UserError(f"there is no benchmark {arguments.name!r}; choose all or one of {', '.join(BENCHMARKS)}")
    if arguments.json is not None:
        check_writable(arguments.json)

    session = Session(
        command=shlex.join(["openk3", "bench", *argv]),
        threads=arguments.threads,
        runs=arguments.runs,
        device=pick_device(arguments.device),
    )
    rows: list[Row] = []
    for name in BENCHMARKS if arguments.name == "all" else (arguments.name,):
        taken: list[Row] = []
        for row in BENCHMARKS[name].load()(session):
            taken.append(row)
            if arguments.json is not None:
                write_rows([*rows, *taken], arguments.json)
        show(taken, console)
        rows += taken
    if arguments.json is not None:
        console.print(f"{len(rows)} rows in {arguments.json}", highlight=False, markup=False)
    return 0 if all(row.ours is not None for row in rows) else 1
