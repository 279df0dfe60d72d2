"""Contestants in turns: one process each, A B A B …, so that a drift of the machine meets all of them alike."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from openk3.bench.contestant import Spec
from openk3.bench.row import median

# One request may take this long: a peer's slowest step is about a minute.
_PATIENCE_SECONDS = 900.0
# A process that has just finished still spins in its thread pool for a moment; the next one waits that out.
_PAUSE_SECONDS = 0.05


class WorkerFailed(Exception):
    """A contestant could not be built, failed in a run or died. `missing` says that it is not installed."""

    def __init__(self, message: str, *, missing: bool = False) -> None:
        super().__init__(message)
        self.missing = missing


class Worker:
    """A process that holds one contestant. Use as a context manager; `run()` is one timed run."""

    def __init__(self, spec: Spec, *, threads: int, warmups: int = 1) -> None:
        environment = dict(os.environ)
        environment |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        # Peers are to run what is installed, and to look nothing up.
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        self._errors = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")
        command = [sys.executable, "-m", "openk3.bench.worker", spec.builder, json.dumps(spec.arguments), str(threads), str(warmups)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, env=environment
        )
        try:
            ready = self._answer()
        except BaseException:
            self.close()
            raise
        self.version = str(ready["version"])
        self.facts: dict[str, Any] = dict(ready["facts"])

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self) -> tuple[float, dict[str, float]]:
        """Seconds of one run, and seconds of the parts that the contestant timed itself."""
        answer = self._ask("run")
        return float(answer["seconds"]), {name: float(seconds) for name, seconds in answer["parts"].items()}

    def profile(self) -> list[dict[str, Any]]:
        """Where the time of one more run goes; see `openk3.bench.profile`."""
        return list(self._ask("profile")["profile"])

    def peak(self) -> dict[str, int]:
        """The most memory the process has held so far, in bytes."""
        answer = self._ask("peak")
        return {name: int(answer[name]) for name in ("peak_bytes", "peak_device_bytes") if answer[name]}

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self._errors.close()

    def _ask(self, what: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": what}) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise WorkerFailed(self._last_words()) from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(_PATIENCE_SECONDS):
                raise WorkerFailed(f"no answer within {_PATIENCE_SECONDS:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise WorkerFailed(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(str(answer["error"]), missing=bool(answer["missing"]))
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().splitlines() if line.strip()]
        how = f"killed by signal {-code}{' (out of memory?)' if code == -9 else ''}" if code < 0 else f"exit code {code}"
        return f"the process died: {how}" + (f": {lines[-1][:200]}" if lines else "")


@dataclass
class Lane:
    """What one contestant did in a race: its seconds run by run, or its error."""

    seconds: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    version: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    profile: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    missing: bool = False


def race(
    specs: Mapping[str, Spec],
    *,
    runs: int,
    threads: int,
    warmups: int = 1,
    profiled: str = "",
    on_step: Callable[[str], None] = lambda doing: None,
) -> dict[str, Lane]:
    """Run the contestants `specs` in turns, `runs` times each, and say how long each run took.

    All are built and warmed up first, one after the other. One that fails leaves the race; the others go on. `profiled` names the one
    whose profile is taken after the last run. `on_step` hears what is being done, before it is; it is called `steps(…)` times at most.
    """
    lanes = {name: Lane() for name in specs}
    with contextlib.ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, spec in specs.items():
            on_step(f"{name}: warm-up")
            with _leaving(lanes[name]):
                worker = stack.enter_context(Worker(spec, threads=threads, warmups=warmups))
                workers[name] = worker
                lanes[name].version, lanes[name].facts = worker.version, worker.facts
        for turn in range(runs):
            for name, worker in workers.items():
                on_step(f"{name}: run {turn + 1} of {runs}")
                if not lanes[name].error:
                    with _leaving(lanes[name]):
                        _record(lanes[name], worker)
        for name, worker in workers.items():
            if not lanes[name].error:
                with _leaving(lanes[name]):
                    lanes[name].memory = worker.peak()
                    if name == profiled:
                        on_step(f"{name}: profile")
                        lanes[name].profile = worker.profile()
    return lanes


def steps(contestants: int, *, runs: int, profiled: bool) -> int:
    """How often `race` calls `on_step` when nothing fails."""
    return contestants * (runs + 1) + int(profiled)


def _record(lane: Lane, worker: Worker) -> None:
    time.sleep(_PAUSE_SECONDS)
    seconds, parts = worker.run()
    lane.seconds.append(seconds)
    for part, value in parts.items():
        lane.parts.setdefault(part, []).append(value)


@contextlib.contextmanager
def _leaving(lane: Lane) -> Iterator[None]:
    """A failure inside the block ends this lane's race, not the others'."""
    try:
        yield
    except WorkerFailed as failure:
        lane.error, lane.missing = str(failure), failure.missing


def matrix_rate(lane: Lane) -> float | None:
    """FLOPs a second of the matrix product that ran in the same race; None when it failed."""
    seconds = median(lane.seconds)
    return None if seconds is None else float(lane.facts["flops"]) / seconds
