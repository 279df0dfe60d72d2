"""How many CPUs this process may use: more threads than that only wait for each other."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable(root: Path = Path("/")) -> int:
    """The least of the CPUs it may run on and its control groups' quotas (v2 and v1), rounded up. `root` is where proc and sys lie."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *(math.ceil(quota) for quota in _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """CPUs' worth of time that each control group above this process may take. Every ancestor's limit binds."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, group = line.split(":", 2)
        # Inside a container the path may be the host's, of which only the top is mounted.
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            below = "/".join(parts[:depth])
            if controllers == "":
                words = _words(mount / below / "cpu.max")
            elif "cpu" in controllers.split(","):
                words = _words(mount / "cpu" / below / "cpu.cfs_quota_us") + _words(mount / "cpu" / below / "cpu.cfs_period_us")
            else:
                continue
            if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]):
                yield int(words[0]) / int(words[1])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
