"""KDA's forms against the recurrence in float64, and against numbers worked out by hand."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.ops import backend
from openk3.ops.kda import kda, kda_chunk, kda_reference
from openk3.ops.kda_tiles import FACTORED_LIMIT, factored_tiles, make_tiles, unit_lower_inverse
from openk3.ops.segments import Segments
from tests.ops.compare import normal
from tests.ops.kda_cases import LENGTHS, RAGGED, distance, expected, make_case, results, without_gradient

# (gate, lower_bound): the bounded gates may use factored tiles, the others may not.
GATED = [("mixed", -5.0), ("mixed", None), ("none", -5.0), ("none", None), ("strongest bounded", -5.0), ("strongest bounded", None)]
UNBOUNDED = [("unbounded", None), ("huge", None), ("huge", -2e4)]


@pytest.mark.parametrize("form", [kda_reference, kda_chunk])
def test_one_number_by_hand(form) -> None:
    # S = 2 decays to 1; the delta reads the decayed state: 1 + 0.5·1·(3 − 1) = 2. Reading S = 2 would give 1.5.
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    g, beta, state = one * math.log(0.5), torch.full((1, 1), 0.5, dtype=torch.float64), 2 * one[None]
    for leaf in (one, one.clone().requires_grad_()):
        o, final = form(leaf, one, 3 * one, g, beta, Segments.of([1]), state, scale=10.0)
        assert final.item() == pytest.approx(2.0, abs=1e-14)
        assert o.item() == pytest.approx(20.0, abs=1e-13)


@pytest.mark.parametrize("form", [kda_reference, kda_chunk])
def test_two_steps_by_hand(form) -> None:
    # Step 1: 0 → 0.5·2·(4 − 0) = 4. Step 2: 4·¼ = 1, then 1 + 1·0.5·(3 − 0.5·1) = 2.25; o = 3·2.25.
    q, k, v = (torch.tensor(x, dtype=torch.float64).view(2, 1, 1) for x in ([1.0, 3.0], [2.0, 0.5], [4.0, 3.0]))
    g = torch.tensor([-7.0, math.log(0.25)], dtype=torch.float64).view(2, 1, 1)
    beta = torch.tensor([[0.5], [1.0]], dtype=torch.float64)
    o, final = form(q, k, v, g, beta, Segments.of([2]), scale=1.0)
    assert final.item() == pytest.approx(2.25, abs=1e-14)
    assert o.flatten().tolist() == pytest.approx([4.0, 6.75], abs=1e-13)


def test_default_scale() -> None:
    case = make_case([5], K=16)
    q, k, v, g, beta, state = case.tensors
    explicit = kda(q, k, v, g, beta, case.segments, state, scale=0.25)[0]
    assert torch.equal(kda(q, k, v, g, beta, case.segments, state)[0], explicit)


@pytest.mark.parametrize("gate, lower_bound", GATED + UNBOUNDED)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length(length: int, gate: str, lower_bound: float | None) -> None:
    case = make_case([length], gate=gate, seed=length)
    wanted = expected(case)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
        for position, (actual, right) in enumerate(zip(results(kda, case, dtype, lower_bound), wanted, strict=True)):
            assert bool(torch.isfinite(actual).all())
            assert distance(actual, right) <= tolerance, (position, dtype)
        for actual, right in zip(without_gradient(kda, case, dtype, lower_bound), wanted, strict=False):
            assert distance(actual, right) <= tolerance


@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("length", LENGTHS)
def test_equal_keys_written_in_full(length: int, lower_bound: float | None) -> None:
    for gate in ("none", "mixed", "strongest bounded"):
        case = make_case([length], gate=gate, equal_keys=True)
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
            for actual, right in zip(results(kda, case, dtype, lower_bound), expected(case), strict=True):
                assert bool(torch.isfinite(actual).all())
                assert distance(actual, right) <= tolerance


@pytest.mark.parametrize("H, K, V, state", [(1, 1, 1, True), (3, 5, 7, True), (2, 24, 16, False), (8, 4, 4, False)])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_ragged(H: int, K: int, V: int, state: bool, lower_bound: float | None) -> None:
    case = make_case(RAGGED, H=H, K=K, V=V, state=state)
    wanted = expected(case)
    for actual, right in zip(results(kda, case, lower_bound=lower_bound), wanted, strict=True):
        assert distance(actual, right) <= 1e-12
    for actual, right in zip(without_gradient(kda, case, lower_bound=lower_bound), wanted, strict=False):
        assert distance(actual, right) <= 1e-12


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(0, 3), st.integers(0, 80)), max_size=6),
    state=st.booleans(),
    lower_bound=st.sampled_from([-5.0, None]),
    H=st.integers(1, 3),
)
def test_any_ragged_batch(lengths: list[int], state: bool, lower_bound: float | None, H: int) -> None:
    case = make_case(lengths, H=H, K=3, V=2, state=state, seed=sum(lengths))
    wanted = expected(case)
    for actual, right in zip(results(kda, case, lower_bound=lower_bound), wanted, strict=True):
        assert distance(actual, right) <= 1e-11
    for actual, right in zip(without_gradient(kda, case, lower_bound=lower_bound), wanted, strict=False):
        assert distance(actual, right) <= 1e-11


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gradcheck(lower_bound: float | None) -> None:
    case = make_case([18, 1, 5], H=1, K=2, V=3)
    leaves = [t.detach().clone().requires_grad_() for t in case.tensors]

    def op(q, k, v, g, beta, state):
        return kda(q, k, v, g, beta, case.segments, state, lower_bound=lower_bound)

    assert torch.autograd.gradcheck(op, leaves, fast_mode=True)


@pytest.mark.parametrize("only", ["o", "final state"])
def test_gradient_of_one_result_alone(only: str) -> None:
    case = make_case([70, 3])
    for form_results in zip(*(_one_sided(form, case, only) for form in (kda_chunk, kda_reference)), strict=True):
        assert distance(*form_results) <= 1e-12


def _one_sided(form, case, only: str):
    leaves = [t.detach().clone().requires_grad_() for t in case.tensors]
    o, final = form(*leaves[:5], case.segments, leaves[5])
    out, upstream = (o, case.do) if only == "o" else (final, case.dfinal)
    grads = torch.autograd.grad(out, leaves, upstream, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]


def test_bfloat16_inputs_are_summed_in_fp32() -> None:
    case = make_case([130, 7], K=16, V=24)
    q, k, v, g, beta, state = (t.bfloat16() for t in case.tensors)
    g, beta, state = case.g.float(), case.beta.float(), case.initial_state.float()
    o, final = kda(q, k, v, g, beta, case.segments, state)
    wide_o, wide_final = kda(q.float(), k.float(), v.float(), g, beta, case.segments, state)
    assert o.dtype == torch.bfloat16 and final.dtype == torch.float32
    assert distance(final, wide_final) <= 1e-6
    assert torch.equal(o, wide_o.bfloat16())


def test_autocast_does_not_narrow_it() -> None:
    case = make_case([70], K=16, V=16)
    plain = results(kda, case, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = results(kda, case, torch.float32)
    for a, b in zip(inside, plain, strict=True):
        assert torch.equal(a, b)


def test_gradients_come_in_the_inputs_dtypes() -> None:
    case = make_case([20, 3])
    leaves = [t.to(d).requires_grad_() for t, d in zip(case.tensors, [torch.bfloat16] * 3 + [torch.float32] * 3, strict=True)]
    o, final = kda(*leaves[:5], case.segments, leaves[5])
    for leaf, grad in zip(leaves, torch.autograd.grad((o, final), leaves, (case.do.bfloat16(), case.dfinal.float())), strict=True):
        assert grad.dtype == leaf.dtype
    right = expected(case)
    assert distance(o.detach(), right[0]) <= 2e-2


def test_which_bounds_allow_factored_tiles() -> None:
    assert FACTORED_LIMIT == 80
    assert [factored_tiles(bound) for bound in (None, -0.1, -5.0, -5.001, -20.0)] == [False, True, True, False, False]


@pytest.mark.parametrize("lower_bound", [-0.1, -1.0, -5.0, -20.0])
def test_gradients_at_any_bound(lower_bound: float) -> None:
    case = make_case([64, 33], gate="none")
    g = lower_bound * torch.sigmoid(normal(*case.g.shape, seed=9))
    g[:, :, 0] = lower_bound
    case = type(case)(**{**vars(case), "g": g})
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 5e-6)):
        for actual, right in zip(results(kda, case, dtype, lower_bound), expected(case), strict=True):
            assert distance(actual, right) <= tolerance


@pytest.mark.parametrize("factored", [True, False])
def test_scores_are_the_formula(factored: bool) -> None:
    q, k = normal(1, 2, 64, 3, seed=1), normal(1, 2, 64, 3, seed=2)
    g = -5 * torch.sigmoid(normal(1, 2, 64, 3, seed=3))
    tiles = make_tiles(q, k, g, factored=factored, keep=False)
    G = g.cumsum(2)
    decay = (G[:, :, :, None] - G[:, :, None]).exp()
    for side, rows, diagonal in ((0, q, 0), (1, k, -1)):
        wanted = torch.einsum("nhrk,nhck,nhrck->nhrc", rows, k, decay).tril(diagonal)
        assert distance(tiles.scores[:, :, side], wanted[0]) <= 1e-12
    assert distance(tiles.rows[:, :, 0], (q * G.exp())[0]) <= 1e-12
    assert distance(tiles.columns, (k * (G[:, :, -1:] - G).exp())[0]) <= 1e-12
    assert distance(tiles.decay, G[0, :, -1].exp()) <= 1e-12


@pytest.mark.parametrize("C", [16, 32, 64])
def test_inverse(C: int) -> None:
    eye = torch.eye(C, dtype=torch.float64)
    for L in (torch.ones(1, C, C, dtype=torch.float64), normal(3, C, C, seed=1) * 0.3):
        assert distance(unit_lower_inverse(L), torch.linalg.inv(eye + L.tril(-1))) <= 1e-12


def test_shapes_that_do_not_fit_are_named() -> None:
    case = make_case([3, 2])
    q, k, v, g, beta, state = case.tensors
    for wrong in ({"k": k[:, :1]}, {"v": v[:4]}, {"g": g[..., :1]}, {"beta": beta[..., None]}):
        arguments = {"q": q, "k": k, "v": v, "g": g, "beta": beta} | wrong
        with pytest.raises(ValueError, match=r"q, k, g are \[T, H, K\]"):
            kda(*arguments.values(), case.segments, state)
    with pytest.raises(ValueError, match=r"initial_state is \[N, H, K, V\] = \[2, 2, 8, 12\]"):
        kda(q, k, v, g, beta, case.segments, state[:1])
    with pytest.raises(ValueError, match="6 tokens, but the tensor has 5"):
        kda(q, k, v, g, beta, Segments.of([3, 3]), state)


@pytest.mark.parametrize("form", ["reference", "torch"])
def test_no_tokens_and_no_sequences(form: str) -> None:
    run = partial(kda, lower_bound=-5.0)
    with backend.use(form):
        for lengths in ([], [0], [0, 0]):
            case = make_case(lengths)
            o, final, *grads = results(run, case)
            assert o.shape == (0, 2, 12)
            assert torch.equal(final, case.initial_state)
            assert torch.equal(grads[5], case.dfinal)
            assert torch.equal(without_gradient(kda, case)[1], case.initial_state)


def test_the_input_state_is_left_alone() -> None:
    for lengths in ([1, 1], [70, 0], [1, 0, 70]):
        case = make_case(lengths)
        before = case.initial_state.clone()
        final = without_gradient(kda, case)[1]
        assert torch.equal(case.initial_state, before)
        assert final.untyped_storage().data_ptr() != case.initial_state.untyped_storage().data_ptr()
