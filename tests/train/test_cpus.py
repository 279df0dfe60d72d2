"""CPUs that this process may use, read from made-up proc and sys trees."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from openk3.train import cpus


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "count"),
    [
        ("0::/\n", {}, 64),
        ("0::/job\n", {"job/cpu.max": "max 100000\n"}, 64),
        ("0::/job\n", {"job/cpu.max": "200000 100000\n"}, 2),
        ("0::/job\n", {"job/cpu.max": "150000 100000\n"}, 2),
        ("0::/job\n", {"job/cpu.max": "50000 100000\n"}, 1),
        ("0::/pod/job\n", {"pod/cpu.max": "300000 100000\n", "pod/job/cpu.max": "800000 100000\n"}, 3),
        ("0::/docker/abc\n", {"cpu.max": "400000 100000\n"}, 4),
        ("4:cpu,cpuacct:/job\n2:memory:/job\n", {"cpu/job/cpu.cfs_quota_us": "500000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 5),
        ("4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 64),
    ],
)
def test_the_least_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cgroup: str, files: dict[str, str], count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert cpus.usable(machine(tmp_path, cgroup, files)) == count


def test_this_machine_has_one() -> None:
    assert 1 <= cpus.usable() <= (os.cpu_count() or 1)
