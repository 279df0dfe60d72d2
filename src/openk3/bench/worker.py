"""The process that holds one contestant: it builds it, warms it up, and on each request runs it once and answers the time.

    echo '{"do": "run"}' | python -m openk3.bench.worker openk3.bench.machine:matmul '{"size": 256}' 2 1

The arguments are the builder, its arguments as JSON, torch's threads and the warm-up runs. Requests and answers are lines of JSON. The
first answer tells the contestant's version and facts, or its error; the end of the requests ends the process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from openk3.bench.contestant import Contestant
from openk3.bench.profile import where_time_goes


def main(argv: list[str]) -> int:
    """Serve the contestant that `argv` names; the exit code."""
    # Libraries print to stdout; the answers keep the real one for themselves.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    try:
        contestant = _build(argv[0], json.loads(argv[1]), int(argv[2]))
        for _ in range(int(argv[3])):
            _timed(contestant.run)
    except Exception as error:
        answer({"error": _one_line(error), "missing": isinstance(error, ImportError)})
        return 1
    answer({"version": contestant.version, "facts": contestant.facts})
    for line in sys.stdin:
        try:
            answer(_serve(json.loads(line)["do"], contestant))
        except Exception as error:
            answer({"error": _one_line(error), "missing": False})
            return 1
    return 0


def _build(builder: str, arguments: dict[str, Any], threads: int) -> Contestant:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    module, _, function = builder.partition(":")
    contestant = getattr(importlib.import_module(module), function)(**arguments)
    if not isinstance(contestant, Contestant):
        raise TypeError(f"{builder} built a {type(contestant).__name__}, not a Contestant")
    return contestant


def _serve(request: str, contestant: Contestant) -> dict[str, Any]:
    if request == "run":
        seconds, parts = _timed(contestant.run)
        return {"seconds": seconds, "parts": parts}
    if request == "profile":
        return {"profile": where_time_goes(contestant.run)}
    if request == "peak":
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
        return {"peak_bytes": kilobytes * 1024, "peak_device_bytes": device}
    raise ValueError(f"unknown request {request!r}")


def _timed(run: Callable[[], dict[str, float] | None]) -> tuple[float, dict[str, float]]:
    """Seconds of one run, with what it left on a GPU finished, and the parts that it timed itself."""
    gc.collect()
    _synchronize()
    start = time.perf_counter()
    parts = run()
    _synchronize()
    return time.perf_counter() - start, parts or {}


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
