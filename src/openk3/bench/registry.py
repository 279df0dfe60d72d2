"""The benchmarks by name. A module is imported only when its benchmark runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from openk3.bench.row import Row
from openk3.bench.session import Session


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: `module` has `measure(session) -> Iterator[Row]`."""

    module: str
    summary: str

    def load(self) -> Callable[[Session], Iterator[Row]]:
        """The function that measures it, row by row."""
        measure: Callable[[Session], Iterator[Row]] = importlib.import_module(self.module).measure
        return measure


BENCHMARKS: dict[str, Benchmark] = {
    "kda": Benchmark("openk3.bench.kda", "the KDA op: forward, forward + backward, and its cost per token as sequences grow"),
    "train": Benchmark("openk3.bench.train", "a training step of a 29 M-parameter model, and the optimizer's share of it"),
}
