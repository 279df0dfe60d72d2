"""Small contestants for the tests of the harness; worker processes import this module by its name."""

from __future__ import annotations

import os
import time
from typing import Any

from openk3.bench.contestant import Contestant, require


def sleeper(*, seconds: float, log: str = "", name: str = "") -> Contestant:
    """Sleeps; appends its name to the file `log` at each run."""

    def run() -> dict[str, float]:
        print("libraries print to stdout, and that must not disturb the answers")
        time.sleep(seconds)
        if log:
            with open(log, "a") as file:
                file.write(name + "\n")
        return {"part": seconds / 2}

    facts: dict[str, Any] = {"threads": os.environ["OMP_NUM_THREADS"], "offline": os.environ["HF_HUB_OFFLINE"]}
    return Contestant(run=run, version="sleeper 1", facts=facts)


def absent() -> Contestant:
    """A peer that is not installed."""
    require("no-such-peer", "1.0")
    raise AssertionError


def fails_in_run(*, at: int) -> Contestant:
    """Fails in its run number `at`, counted from 1 with the warm-up."""
    count = [0]

    def run() -> None:
        count[0] += 1
        if count[0] == at:
            raise RuntimeError("it broke")

    return Contestant(run=run, version="1")


def dies() -> Contestant:
    """Its process ends without a word to the other side."""

    def run() -> None:
        os.write(2, b"last words\n")
        os._exit(7)

    return Contestant(run=run, version="1")


def not_a_contestant() -> int:
    """A builder that builds the wrong thing."""
    return 3
