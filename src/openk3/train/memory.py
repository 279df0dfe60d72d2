"""Whether a run fits, asked before anything is allocated: the estimate of `accounting` against what the system will give."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from openk3.errors import UserError

_UNLIMITED = 2**60
"""cgroup v1 writes "no limit" as a number near 2⁶³."""


def available(root: Path = Path("/")) -> int:
    """Bytes that this process can still allocate: the least of the system's free memory and the limits of its control groups.

    Linux: MemAvailable, cgroup v2 and v1 (with the file cache counted as free, since the kernel gives it up), RLIMIT_AS. Elsewhere:
    what psutil calls available. `root` is where proc and sys lie.
    """
    meminfo = _meminfo(root / "proc/meminfo")
    if "MemAvailable" not in meminfo:
        import psutil

        return int(psutil.virtual_memory().available)
    return max(0, min([meminfo["MemAvailable"], *_cgroup_rooms(root), *_address_space(root)]))


def _meminfo(path: Path) -> dict[str, int]:
    result: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return result
    for line in lines:
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdigit():
            result[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return result


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """What each control group above this process leaves free. A group's limit binds all below it, so every ancestor counts."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, files = mount, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, files = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Inside a container the path may be the host's, of which only the top is mounted.
        parts = [part for part in group.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            room = _room(top.joinpath(*parts[:depth]), *files)
            if room is not None:
                yield room


def _room(group: Path, limit_file: str, usage_file: str, cache_key: str) -> int | None:
    limit, usage = _number(group / limit_file), _number(group / usage_file)
    if limit is None or usage is None or limit >= _UNLIMITED:
        return None
    return max(0, limit - max(0, usage - _cache(group / "memory.stat", cache_key)))


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _cache(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)


def _address_space(root: Path) -> Iterator[int]:
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        try:
            pages = int((root / "proc/self/statm").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            pages = 0
        yield max(0, soft - pages * os.sysconf("SC_PAGE_SIZE"))


def check_fits(needed: Mapping[str, int], room: int, advice: str) -> None:
    """Raise UserError, with each term of `needed` (bytes by name), when their sum exceeds `room`. `advice` says what to change."""
    total = sum(needed.values())
    if total <= room:
        return
    terms = ", ".join(f"{name} {readable(size)}" for name, size in sorted(needed.items(), key=lambda item: -item[1]) if size)
    raise UserError(f"this needs {readable(total)} of memory ({terms}), but {readable(room)} are available: {advice}")


def readable(size: float) -> str:
    """Bytes with a unit: `3.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def resident() -> int:
    """Bytes of memory that this process holds now."""
    import psutil

    return int(psutil.Process().memory_info().rss)
