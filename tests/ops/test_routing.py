"""The router against the release's numbers, a loop over Python floats, and its rule for ties."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openk3.ops import backend
from openk3.ops.routing import Selection, route
from tests.ops.compare import normal, saved_bytes
from tests.support import oracle_json, oracle_tensors, worst

CASES = sorted(case for case in oracle_json("ops") if case.startswith("router."))
FORMS = ["torch", "reference"]


def oracle(case: str, key: str) -> Tensor:
    return oracle_tensors("ops")[f"{case}.{key}"]


def settings_of(case: str) -> dict:
    override = oracle_json("ops")[case]["override"]
    return {
        "top_k": override.get("num_experts_per_token", 4),
        "activation": override.get("moe_router_activation_func", "sigmoid"),
        "renormalize": override.get("moe_renormalize", True),
        "scale": override.get("routed_scaling_factor", 1.0),
        "groups": override.get("num_expert_group", 1),
        "topk_groups": override.get("topk_group", 1),
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_router_is_the_release(case: str, form: str) -> None:
    x, weight, bias = (oracle(case, key) for key in ("x", "weight", "bias"))
    with backend.use(form):
        wide = route(x.double(), weight.double(), bias.double(), **settings_of(case))
        single = route(x, weight, bias, **settings_of(case))
    assert torch.equal(wide.ids, oracle(case, "indices")) and torch.equal(single.ids, oracle(case, "indices"))
    assert worst(wide.weights, oracle(case, "weights_f64")) < 1e-9
    assert worst(single.weights, oracle(case, "weights_f32")) < 1e-6
    assert single.weights.dtype == single.scores.dtype == torch.float32


def by_loop(scores: list[float], k: int, groups: int = 1, kept_groups: int = 1) -> tuple[list[int], float]:
    """Highest first, equal scores by id, in plain Python: shares nothing with the op."""
    size = len(scores) // groups
    allowed = set(range(len(scores)))
    if groups > kept_groups:
        worth = [(-sum(sorted(scores[g * size : (g + 1) * size], reverse=True)[:2]), g) for g in range(groups)]
        allowed = {g * size + m for _, g in sorted(worth)[:kept_groups] for m in range(size)}
    masked = [score if e in allowed else -float("inf") for e, score in enumerate(scores)]
    order = sorted(range(len(masked)), key=lambda e: (-masked[e], e))
    return sorted(order[:k]), masked[order[k]] if k < len(order) else -float("inf")


def from_scores(scores: Tensor, k: int, **options) -> Selection:
    """Route so that the biased scores are `scores` plus exactly 1/2: zero logits, the rest by the bias, one row at a time."""
    parts = [route(scores.new_zeros(1, 2), scores.new_zeros(scores.shape[1], 2), row, k, **options) for row in scores]
    return Selection(*(torch.cat([part[i] for part in parts]) for i in range(4)))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_ties_go_to_the_lower_id(form: str, data: st.DataObject) -> None:
    experts, groups, kept = data.draw(st.sampled_from([(1, 1, 1), (5, 1, 1), (16, 1, 1), (12, 4, 2), (12, 3, 1), (8, 2, 2), (40, 1, 1)]))
    most = experts // groups * kept if groups > kept else experts
    k = data.draw(st.integers(1, most))
    levels = data.draw(
        st.lists(st.lists(st.sampled_from([-0.5, 0.0, 0.25, 1.0]), min_size=experts, max_size=experts), min_size=1, max_size=4)
    )
    with backend.use(form):
        got = from_scores(torch.tensor(levels, dtype=torch.float64), k, groups=groups, topk_groups=kept)
    assert got.cutoff is not None
    for row, level in enumerate(levels):
        ids, cutoff = by_loop([score + 0.5 for score in level], k, groups, kept)
        assert got.ids[row].tolist() == ids and float(got.cutoff[row]) == cutoff


@pytest.mark.parametrize("form", FORMS)
def test_an_all_zero_router_takes_the_first_experts(form: str) -> None:
    with backend.use(form):
        got = route(torch.zeros(5, 8), torch.zeros(32, 8), torch.zeros(32), 4)
    assert got.ids.tolist() == [[0, 1, 2, 3]] * 5
    assert worst(got.weights, torch.full((5, 4), 0.25)) < 1e-7
    assert got.cutoff is not None and got.cutoff.tolist() == [0.5] * 5


@pytest.mark.parametrize("form", FORMS)
def test_scores_that_barely_differ_are_not_ties(form: str) -> None:
    # One unit in the last place of fp32 apart, better ones at the higher ids.
    scores = torch.linspace(0.25, 0.25, 16, dtype=torch.float32)
    for expert in range(1, 16):
        scores[expert] = torch.nextafter(scores[expert - 1], torch.tensor(1.0))
    bias = scores - 0.5
    assert (scores[1:] > scores[:-1]).all() and torch.equal(bias + 0.5, scores)
    with backend.use(form):
        got = route(torch.zeros(1, 2), torch.zeros(16, 2), bias, 4)
    assert got.ids.tolist() == [[12, 13, 14, 15]]


def test_narrow_inputs_are_routed_in_fp32() -> None:
    """The order of these scores is another one in bf16; the ids must be those of the same numbers in fp32."""
    x, weight = normal(300, 64, seed=1, dtype=torch.bfloat16), 0.02 * normal(64, 64, seed=2, dtype=torch.bfloat16)
    narrow = route(x, weight, None, 8)
    assert torch.equal(narrow.ids, route(x.float(), weight.float(), None, 8).ids)
    rounded = torch.sigmoid(x @ weight.t()).sort(dim=-1, descending=True, stable=True).indices[:, :8].sort(-1).values
    assert float((rounded != narrow.ids).any(1).float().mean()) > 0.05, "the case is too easy to tell"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(route(x.float(), weight.float(), None, 8).ids, narrow.ids)


def test_a_bias_finer_than_bf16_decides() -> None:
    bias = torch.linspace(6.817, 7.063, 238)
    assert len(bias.unique()) == 238 and len(bias.bfloat16().unique()) < 20
    got = route(torch.zeros(1, 4, dtype=torch.bfloat16), torch.zeros(238, 4, dtype=torch.bfloat16), bias, 8)
    assert got.ids.tolist() == [list(range(230, 238))]


def test_the_bias_selects_but_does_not_weigh() -> None:
    x, weight = normal(9, 6, seed=3), normal(8, 6, seed=4)
    bias = torch.zeros(8, dtype=torch.float64)
    bias[5] = 10.0
    got = route(x, weight, bias, 3, renormalize=False)
    assert (got.ids == 5).any(1).all()
    assert torch.equal(got.weights, torch.sigmoid(x @ weight.t()).gather(1, got.ids))
    assert torch.equal(got.scores, torch.sigmoid(x @ weight.t()))


@pytest.mark.parametrize("experts, k", [(7, 7), (7, 6), (7, 1), (1, 1)])
def test_cutoff(experts: int, k: int) -> None:
    x, weight, bias = normal(20, 5, seed=5), normal(experts, 5, seed=6), normal(experts, seed=7)
    got = route(x, weight, bias, k)
    biased = torch.sigmoid(x @ weight.t()) + bias
    expected = biased.sort(descending=True).values[:, k] if k < experts else torch.full((20,), -torch.inf, dtype=torch.float64)
    assert got.cutoff is not None and torch.equal(got.cutoff, expected)
    assert ((biased > expected[:, None]).sum(1) == k).all()


@pytest.mark.parametrize("top_k, renormalize, total", [(1, True, None), (4, True, 1.0), (4, False, None)])
def test_weights_are_renormalised_only_when_asked_and_there_are_several(top_k: int, renormalize: bool, total: float | None) -> None:
    got = route(normal(6, 5, seed=8), normal(9, 5, seed=9), None, top_k, renormalize=renormalize, scale=2.5)
    chosen = got.scores.gather(1, got.ids)
    expected = chosen / chosen.sum(1, keepdim=True) if total else chosen
    assert worst(got.weights, 2.5 * expected) < 1e-15


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_replay_keeps_ids_and_takes_weights_from_the_current_scores(activation: str) -> None:
    weight, bias = normal(12, 5, seed=10), normal(12, seed=11)
    first = route(normal(30, 5, seed=12), weight, bias, 3, activation=activation)
    other = normal(30, 5, seed=13)
    replayed = route(other, weight, bias, 3, activation=activation, ids=first.ids)
    assert replayed.ids is first.ids and replayed.cutoff is None
    chosen = replayed.scores.gather(1, first.ids)
    assert worst(replayed.weights, chosen / chosen.sum(1, keepdim=True)) < 1e-15
    again = route(other, weight, bias, 3, activation=activation)
    assert torch.equal(route(other, weight, bias, 3, activation=activation, ids=again.ids).weights, again.weights)


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_gradients(activation: str, renormalize: bool) -> None:
    x, weight = normal(5, 4, seed=14).requires_grad_(), normal(7, 4, seed=15).requires_grad_()
    ids = route(x, weight, None, 3).ids

    def weights(x: Tensor, weight: Tensor) -> Tensor:
        return route(x, weight, None, 3, activation=activation, renormalize=renormalize, scale=1.7, ids=ids).weights

    assert torch.autograd.gradcheck(weights, (x, weight))
    got = route(x, weight, None, 3)
    assert not got.scores.requires_grad and got.cutoff is not None and not got.cutoff.requires_grad and got.weights.requires_grad


def test_a_bf16_input_is_saved_as_it_came() -> None:
    x, weight = (normal(*shape, seed=16, dtype=torch.bfloat16).requires_grad_() for shape in ((500, 64), (4, 64)))
    # Beside x and the router's weight: scores, ids and what the renormalisation keeps, all [T, E] or narrower.
    assert saved_bytes(lambda: route(x, weight, None, 2).weights) < 2 * (500 + 4) * 64 + 500 * (4 * 4 + 2 * 8 + 4 * 4 + 8)


def test_a_token_depends_on_itself_alone() -> None:
    x, weight = normal(80, 24, seed=17, dtype=torch.float32), normal(16, 24, seed=18, dtype=torch.float32)
    before = route(x, weight, None, 4)
    x[:9] = 3.0
    after = route(x, weight, None, 4)
    for one, other in zip(before, after, strict=True):
        assert one is not None and other is not None and torch.equal(one[9:], other[9:])


def test_no_tokens() -> None:
    got = route(torch.zeros(0, 4), torch.zeros(6, 4), torch.zeros(6), 2, groups=2, topk_groups=1)
    assert got.ids.shape == got.weights.shape == (0, 2) and got.scores.shape == (0, 6)
    assert got.cutoff is not None and got.cutoff.shape == (0,)


def test_nan_is_refused_by_name() -> None:
    x, weight = torch.zeros(4, 3), torch.zeros(6, 3)
    x[2, 1] = float("nan")
    with pytest.raises(ValueError, match="NaN for token 2 and expert 0"):
        route(x, weight, None, 2)
    with pytest.raises(ValueError, match="NaN for token 2"):
        route(x, weight, None, 2, ids=torch.zeros(4, 2, dtype=torch.int64))
    bias = torch.zeros(6)
    bias[4] = float("nan")
    with pytest.raises(ValueError, match="bias is NaN for expert 4"):
        route(torch.zeros(4, 3), weight, bias, 2)


def test_saturated_scores_are_not_nan() -> None:
    x = torch.full((2, 3), 1e30)
    got = route(x, torch.stack([torch.full((3,), sign * 1e30) for sign in (1.0, -1.0, 1.0)]), None, 2)
    assert got.ids.tolist() == [[0, 2]] * 2 and got.weights.tolist() == [[0.5, 0.5]] * 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"top_k": 7}, "cannot choose 7 of 6"),
        ({"top_k": 0}, "cannot choose 0 of 6"),
        ({"activation": "tanh"}, "tanh"),
        ({"groups": 4, "topk_groups": 1}, "4 groups"),
        ({"groups": 3, "topk_groups": 1, "top_k": 3}, "1 groups of 2"),
        ({"bias": torch.zeros(5)}, "do not fit"),
        ({"ids": torch.zeros(3, 2, dtype=torch.int64)}, "replay"),
    ],
)
def test_refusals(options: dict, message: str) -> None:
    given = {"top_k": 2, "bias": None, **options}
    with pytest.raises(ValueError, match=message):
        route(torch.zeros(4, 3), torch.zeros(6, 3), given.pop("bias"), given.pop("top_k"), **given)


def test_896_experts() -> None:
    x, weight, bias = normal(64, 32, seed=19), 0.2 * normal(896, 32, seed=20), 0.1 * normal(896, seed=21)
    got = route(x, weight, bias, 16)
    biased = torch.sigmoid(x @ weight.t()) + bias
    for row in range(64):
        assert got.ids[row].tolist() == by_loop(biased[row].tolist(), 16)[0]
    assert len({int(e) for e in got.ids.flatten()}) > 100
