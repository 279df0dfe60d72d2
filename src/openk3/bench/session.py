"""One call of `openk3 bench`: what all its rows have in common, and the progress that a person sees while it measures."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from openk3 import __version__
from openk3.bench.contestant import Spec
from openk3.bench.machine import describe, running_commit
from openk3.bench.race import Lane, race, steps
from openk3.bench.row import Row, median, times_better


@dataclass(frozen=True)
class Peer:
    """Another implementation that a row compares with, and whether it was tuned for this work on this kind of machine."""

    name: str
    spec: Spec
    tuned: bool
    note: str


@dataclass
class Session:
    """The settings of one call. `runs` overrides how often each contestant runs; None leaves it to the benchmark."""

    command: str
    threads: int = 2
    runs: int | None = None
    device: str = "cpu"
    console: Console = field(default_factory=lambda: Console(stderr=True))
    machine: dict[str, Any] = field(default_factory=describe)
    commit: str = field(default_factory=running_commit)

    def race(
        self, title: str, specs: Mapping[str, Spec], *, runs: int, threads: int | None = None, warmups: int = 1, profiled: str = ""
    ) -> dict[str, Lane]:
        """`openk3.bench.race.race` with a progress bar; `runs` is what holds unless the command line says otherwise."""
        runs = self.runs or runs
        columns = (
            TextColumn("{task.fields[title]}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", style="dim"),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task("", title=title, total=steps(len(specs), runs=runs, profiled=bool(profiled)))

            def on_step(doing: str) -> None:
                progress.update(task, description=doing, advance=1)

            return race(
                specs, runs=runs, threads=threads or self.threads, warmups=warmups, profiled=profiled, on_step=on_step
            )

    def row(
        self,
        *,
        name: str,
        case: str,
        unit: str,
        phase: str,
        context: int,
        batch: int,
        precision: str,
        scope: str,
        samples: list[float],
        peer: Peer | None = None,
        peer_lane: Lane | None = None,
        peer_samples: list[float] | None = None,
        lower_is_better: bool,
        limit_share: float | None = None,
        error: str = "",
        detail: dict[str, Any] | None = None,
    ) -> Row:
        """A row of this session. `samples` and `peer_samples` are in `unit`; an empty list of ours or the peer's means that it failed."""
        theirs = peer_samples or []
        ours, peer_value = median(samples), median(theirs)
        errors = [error] if error else []
        if peer is not None and peer_lane is not None and peer_lane.error:
            errors.append(f"{peer.name} {'is not installed (make setup-bench)' if peer_lane.missing else 'failed'}: {peer_lane.error}")
        return Row(
            name=name,
            case=case,
            ours=ours,
            unit=unit,
            peer=peer.name if peer else "",
            peer_value=peer_value,
            ratio=times_better(ours, peer_value, lower_is_better=lower_is_better),
            limit_share=limit_share,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            version=__version__,
            commit=self.commit,
            machine=self.machine,
            threads=self.threads,
            command=self.command,
            phase=phase,
            context=context,
            batch=batch,
            precision=precision,
            baseline=peer.name if peer else "",
            baseline_version=peer_lane.version if peer_lane else "",
            baseline_tuned=peer.tuned if peer else None,
            baseline_note=peer.note if peer else "",
            runs=len(samples),
            scope=scope,
            samples=samples,
            peer_samples=theirs,
            detail={**(detail or {}), **({"error": "; ".join(errors)} if errors else {})},
        )

    def other_threads(self) -> int | None:
        """One other thread count to measure ours with; None on a machine with one core or on a GPU."""
        if self.device != "cpu":
            return None
        return 1 if self.threads != 1 else None


def pick_device(asked: str) -> str:
    """The device that `asked` ("auto", "cpu" or "cuda") means here."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return asked
