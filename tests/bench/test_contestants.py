"""What the benchmarks time is the same work on both sides: the KDA contestants agree, the training contestants have the same sizes."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import pytest

from openk3.bench import kda, train
from openk3.bench.contestant import Contestant
from openk3.bench.race import Lane
from openk3.ops import backend

MODES = ["forward", "forward+backward"]
needs_peers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="the peers are not installed (make setup-bench)")


def difference(one: Contestant, other: Contestant) -> float:
    value = kda._difference(Lane(facts=one.facts), Lane(facts=other.facts))
    assert value is not None
    return value


@pytest.mark.parametrize("mode", MODES)
def test_the_timed_op_is_the_recurrence(mode: str) -> None:
    ours = kda.ours(tokens=100, mode=mode, device="cpu")
    with backend.use("reference"):
        reference = kda.ours(tokens=100, mode=mode, device="cpu")
    assert reference.facts["backend"] == "reference" and ours.facts["backend"] == "torch"
    assert len(ours.facts["results"]) == (1 if mode == "forward" else 6)
    assert difference(ours, reference) < 1e-4


@needs_peers
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("peer", [kda.transformers_fallback, kda.fla_naive])
def test_peers_compute_what_ours_computes(peer: Callable[..., Contestant], mode: str) -> None:
    assert difference(kda.ours(tokens=128, mode=mode, device="cpu"), peer(tokens=128, mode=mode, device="cpu")) < 1e-4


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="one of forward, forward"):
        kda.ours(tokens=64, mode="backward", device="cpu")


def test_a_difference_is_relative_to_the_largest_value() -> None:
    ours, theirs = Lane(facts={"results": [[1.0, 4.0], [0.0]]}), Lane(facts={"results": [[1.0, 5.0], [0.5]]})
    assert kda._difference(ours, theirs) == 1.0
    assert kda._difference(ours, Lane(error="failed")) is None


def test_our_training_step_has_the_stated_size_and_a_loss_near_that_of_chance() -> None:
    contestant = train.our_step(precision="fp32", device="cpu")
    contestant.run()
    assert contestant.facts["parameters"] == 28_992_920
    assert abs(contestant.facts["loss"] - math.log(8192)) < 0.5


def test_a_whole_step_times_its_parts() -> None:
    parts = train.whole_step(precision="fp32", device="cpu").run()
    assert parts is not None and set(parts) == {"forward+backward", "clip", "optimizer", "balancing"}
    assert all(seconds >= 0 for seconds in parts.values()) and parts["optimizer"] > 0


@needs_peers
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_transformers_trains_a_model_of_the_same_size() -> None:
    contestant = train.transformers_step(precision="fp32", device="cpu")
    assert contestant.facts["parameters"] == 28_992_920
    contestant.run()
    assert abs(contestant.facts["loss"] - math.log(8192)) < 0.5
