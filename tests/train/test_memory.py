"""What this process may allocate, read from made-up proc and sys trees, and the refusal of what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from openk3.errors import UserError
from openk3.train import memory

GIB = 2**30


def machine(root: Path, *, available_kb: int = 8 * 2**20, cgroup: str = "0::/\n", files: dict[str, str] | None = None) -> Path:
    """A tree with /proc and /sys/fs/cgroup as the kernel shows them."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal:       32000000 kB\nMemFree:         1000 kB\nMemAvailable:   {available_kb} kB\nHugePages_Total: 0\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in (files or {}).items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def test_without_limits_it_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    assert memory.available(machine(tmp_path)) == 8 * GIB


def test_a_v2_group_limit_counts_and_its_file_cache_is_free(tmp_path: Path) -> None:
    files = {"job/memory.max": f"{4 * GIB}\n", "job/memory.current": f"{3 * GIB}\n", "job/memory.stat": f"anon 5\ninactive_file {GIB}\n"}
    assert memory.available(machine(tmp_path, cgroup="0::/job\n", files=files)) == 2 * GIB


def test_the_limit_of_an_ancestor_binds(tmp_path: Path) -> None:
    files = {
        "pod/memory.max": f"{2 * GIB}\n",
        "pod/memory.current": f"{GIB}\n",
        "pod/job/memory.max": "max\n",
        "pod/job/memory.current": "0\n",
    }
    assert memory.available(machine(tmp_path, cgroup="0::/pod/job\n", files=files)) == GIB


def test_a_container_sees_its_own_limit_at_the_top_of_the_mount(tmp_path: Path) -> None:
    files = {"memory.max": f"{GIB}\n", "memory.current": "0\n"}
    assert memory.available(machine(tmp_path, cgroup="0::/docker/abc/../def\n", files=files)) == GIB


def test_a_v1_group_limit_counts(tmp_path: Path) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": f"{3 * GIB}\n",
        "memory/job/memory.usage_in_bytes": f"{2 * GIB}\n",
        "memory/job/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "1\n",
    }
    cgroup = "11:cpu,cpuacct:/other\n7:memory:/job\n0::/\n"
    assert memory.available(machine(tmp_path, cgroup=cgroup, files=files)) == 2 * GIB


def test_an_exhausted_group_leaves_nothing_rather_than_less(tmp_path: Path) -> None:
    files = {"memory.max": "1000\n", "memory.current": "5000\n"}
    assert memory.available(machine(tmp_path, files=files)) == 0


def test_this_machine_has_memory() -> None:
    assert 2**20 < memory.available() < 2**50
    assert memory.resident() > 2**20


def test_what_does_not_fit_is_refused_with_its_terms_largest_first() -> None:
    needed = {"weights": 2 * GIB, "activations": 5 * GIB, "optimizer": 0}
    memory.check_fits(needed, 7 * GIB, "use less")
    with pytest.raises(UserError) as refusal:
        memory.check_fits(needed, 7 * GIB - 1, "use less")
    assert str(refusal.value) == "this needs 7.0 GiB of memory (activations 5.0 GiB, weights 2.0 GiB), but 7.0 GiB are available: use less"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * GIB, "3.0 GiB"), (5000 * 2**40, "5,000.0 TiB")]
)
def test_sizes_are_readable(size: int, text: str) -> None:
    assert memory.readable(size) == text
