"""Where the time of a run goes: torch's profiler, summed up by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def where_time_goes(run: Callable[[], object], *, most: int = 12) -> list[dict[str, Any]]:
    """The ops that take most of one run of `run`, by their own time (not that of ops they call).

    Each is `{"op", "share", "milliseconds", "calls"}`; `share` is of the time in all ops, so what Python itself takes is not in it.
    The profiler slows a run down: believe the shares, not the sum.
    """
    on_gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_gpu else [])
    with profile(activities=activities) as prof:
        run()
    events = [(str(e.key), float(e.self_device_time_total if on_gpu else e.self_cpu_time_total), int(e.count)) for e in prof.key_averages()]
    total = sum(time for _, time, _ in events) or 1.0
    events.sort(key=lambda event: -event[1])
    return [
        {"op": op, "share": round(time / total, 4), "milliseconds": round(time / 1e3, 3), "calls": calls}
        for op, time, calls in events[:most]
        if time > 0
    ]
