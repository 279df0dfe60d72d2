"""What the figures were measured on, and what that machine can do at most: its matrix rate and its read bandwidth."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from openk3.bench.contestant import Contestant

# The instruction sets that decide which matrix kernels a CPU can run.
_ISA = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


def describe() -> dict[str, Any]:
    """The machine in words and numbers: CPU, cores, instruction sets, memory in bytes, GPU, system and library versions, and `load`, how
    many processes wanted a core in the minute before."""
    name, flags = _cpu()
    return {
        "cpu": name,
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "isa": [flag for flag in _ISA if flag in flags],
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu() -> tuple[str, set[str]]:
    """Name and feature flags of the CPU, as far as the system tells them."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor() or platform.machine(), set()
    fields: dict[str, str] = {}
    for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name") or platform.machine()
    return name, set((fields.get("flags") or fields.get("Features") or "").split())


def running_commit() -> str:
    """The commit of the source that runs, with `+changes` when files differ from it; "unknown" outside a git checkout."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        return head + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def matmul(*, size: int = 2048, dtype: str = "float32", device: str = "cpu") -> Contestant:
    """A matrix product of `size`³, the work that a matrix rate is measured with: 2·size³ FLOPs a run."""
    kind = getattr(torch, dtype)
    a, b = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
    out = torch.empty(size, size, dtype=kind, device=device)

    def run() -> None:
        torch.mm(a, b, out=out)

    return Contestant(run=run, version=f"torch {torch.__version__}", facts={"flops": 2 * size**3})


def read_bandwidth(*, bytes_: int = 1 << 29, rounds: int = 9) -> float:
    """Bytes a second that this process's torch threads read from memory: the best median among ways to pass over an array once.

    `bytes_` should be several times the last-level cache.
    """
    x = torch.ones(bytes_ // 4)
    ways: tuple[Callable[[], object], ...] = (x.sum, x.max, lambda: torch.dot(x, x))
    return max(_median_rate(way, x.numel() * x.element_size(), rounds) for way in ways)


def _median_rate(read: Callable[[], object], size: int, rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        read()
        times.append(time.perf_counter() - start)
    return size / sorted(times)[rounds // 2]
