"""Contestants run in turns in processes of their own, and one that fails neither hides nor stops the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from openk3.bench.contestant import Spec
from openk3.bench.race import Lane, Worker, WorkerFailed, matrix_rate, race, steps


@pytest.fixture(autouse=True)
def workers_find_the_contestants(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


def spec(function: str, **arguments: object) -> Spec:
    return Spec(f"contestants:{function}", dict(arguments))


def test_contestants_take_turns_after_their_warm_ups(tmp_path: Path) -> None:
    log = tmp_path / "log"
    heard: list[str] = []
    specs = {name: spec("sleeper", seconds=0.02, log=str(log), name=name) for name in "AB"}
    lanes = race(specs, runs=3, threads=1, on_step=heard.append)
    assert log.read_text().split() == ["A", "B"] + ["A", "B"] * 3
    assert heard[:3] == ["A: warm-up", "B: warm-up", "A: run 1 of 3"] and len(heard) == steps(2, runs=3, profiled=False)
    for lane in lanes.values():
        assert len(lane.seconds) == 3 and all(0.02 <= seconds < 30 for seconds in lane.seconds)
        assert lane.parts == {"part": [0.01, 0.01, 0.01]}
        assert (lane.version, lane.error) == ("sleeper 1", "")
        assert lane.memory["peak_bytes"] > 10e6


def test_a_worker_has_its_threads_and_looks_nothing_up() -> None:
    with Worker(spec("sleeper", seconds=0), threads=1, warmups=0) as worker:
        assert worker.facts == {"threads": "1", "offline": "1"}


def test_one_that_fails_leaves_the_race_and_says_why() -> None:
    specs = {
        "good": spec("sleeper", seconds=0),
        "absent": spec("absent"),
        "wrong": spec("not_a_contestant"),
        "breaks": spec("fails_in_run", at=3),
        "dies": spec("dies"),
    }
    lanes = race(specs, runs=3, threads=1)
    assert len(lanes["good"].seconds) == 3 and not lanes["good"].error
    assert lanes["absent"].missing and lanes["absent"].error == "PeerMissing: no-such-peer 1.0"
    assert lanes["wrong"].error == "TypeError: contestants:not_a_contestant built a int, not a Contestant" and not lanes["wrong"].missing
    assert lanes["breaks"].error == "RuntimeError: it broke" and len(lanes["breaks"].seconds) == 1
    assert lanes["dies"].error == "the process died: exit code 7: last words"


def test_a_worker_that_failed_to_start_leaves_no_process() -> None:
    with pytest.raises(WorkerFailed, match="no-such-peer"):
        Worker(spec("absent"), threads=1)


def test_the_profile_names_the_op_that_takes_the_time() -> None:
    product = Spec("openk3.bench.machine:matmul", {"size": 256})
    lanes = race({"product": product, "other": product}, runs=1, threads=1, profiled="product")
    top = lanes["product"].profile[0]
    assert top["op"] == "aten::mm" and top["share"] > 0.5 and top["calls"] == 1
    assert lanes["other"].profile == []


def test_the_matrix_rate_is_flops_over_the_median_time() -> None:
    assert matrix_rate(Lane(seconds=[1.0, 4.0, 2.0], facts={"flops": 10})) == 5.0
    assert matrix_rate(Lane(error="failed")) is None
