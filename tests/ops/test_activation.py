"""SiTU-GLU and SwiGLU against the release's numbers, a table by hand, and their formulas."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from openk3.ops.activation import GluActivation, situ_glu, situ_glu_reference, swiglu, swiglu_reference
from tests.ops.compare import assert_agree, assert_same_op, normal, saved_bytes, value_and_gradients
from tests.support import oracle_json, oracle_tensors, worst

CASES = sorted(case for case in oracle_json("ops") if case.startswith("situ."))
SITU, SILU = GluActivation("situ", 4.0, 25.0), GluActivation("silu")


def oracle(case: str, key: str) -> Tensor:
    return oracle_tensors("ops")[f"{case}.{key}"]


@pytest.mark.parametrize("form", [situ_glu, situ_glu_reference])
@pytest.mark.parametrize("case", CASES)
def test_situ_is_the_release(case: str, form) -> None:
    beta, linear_beta = oracle_json("ops")[case]["beta"], oracle_json("ops")[case]["linear_beta"]
    gate, up = (oracle(case, key).double().requires_grad_() for key in ("gate", "up"))
    y = form(gate, up, beta, linear_beta)
    dgate, dup = torch.autograd.grad(y.sum(), (gate, up))
    assert worst(y.detach(), oracle(case, "y_f64")) < 1e-9
    assert worst(dgate, oracle(case, "dgate_f64")) < 1e-9
    assert worst(dup, oracle(case, "dup_f64")) < 1e-9
    assert worst(form(oracle(case, "gate"), oracle(case, "up"), beta, linear_beta), oracle(case, "y_f32")) < 2e-5
    narrow = form(oracle(case, "gate").bfloat16(), oracle(case, "up").bfloat16(), beta, linear_beta)
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, oracle(case, "y_bf16"))


# β = 4, λ = 25: 4·tanh(g/4)·σ(g) · 25·tanh(u/25), worked out in 60-digit arithmetic.
BY_HAND = {0.1: 0.05248698, 1.0: 0.71619956, 10.0: 3.94627803, 1000.0: 4.0}
UP_BY_HAND = {0.1: 0.09999947, 1.0: 0.99946695, 10.0: 9.49872406, 1000.0: 25.0}


@pytest.mark.parametrize("gate", BY_HAND)
@pytest.mark.parametrize("up", UP_BY_HAND)
def test_each_half_is_bounded_by_its_own_bound(gate: float, up: float) -> None:
    y = situ_glu(torch.tensor([gate], dtype=torch.float64), torch.tensor([up], dtype=torch.float64), 4.0, 25.0)
    assert float(y) == pytest.approx(BY_HAND[gate] * UP_BY_HAND[up], rel=1e-6)
    free = situ_glu(torch.tensor([gate], dtype=torch.float64), torch.tensor([up], dtype=torch.float64), 4.0, None)
    assert float(free) == pytest.approx(BY_HAND[gate] * up, rel=1e-6)


def test_sigma_sees_the_unbounded_gate() -> None:
    gate = -3.0
    y = situ_glu(torch.tensor([gate], dtype=torch.float64), torch.ones(1, dtype=torch.float64), 1.0, None)
    assert float(y) == pytest.approx(math.tanh(gate) / (1 + math.exp(-gate)), rel=1e-12)


def test_wide_bounds_are_swiglu() -> None:
    gate, up = normal(50, seed=1), normal(50, seed=2)
    assert worst(situ_glu(gate, up, 1e5, 1e5), swiglu(gate, up)) < 1e-8
    assert worst(swiglu(gate, up), gate / (1 + torch.exp(-gate)) * up) < 1e-14


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 0), (5, 9), (2, 3, 4), (1500, 131)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 8e-2)])
@pytest.mark.parametrize("activation", [SILU, SITU, GluActivation("situ", 1.5)])
def test_fast_is_reference(activation: GluActivation, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    situ = partial(situ_glu_reference, beta=activation.beta, linear_beta=activation.linear_beta)
    plain = swiglu_reference if activation.name == "silu" else situ
    assert_same_op(activation, plain, [3 * normal(*shape, seed=3, dtype=dtype), 3 * normal(*shape, seed=4, dtype=dtype)], tolerance)


@pytest.mark.parametrize("activation", [SILU, SITU])
def test_halves_of_one_tensor(activation: GluActivation) -> None:
    both = normal(6, 10, seed=5)
    together = value_and_gradients(lambda h: activation(h[:, :5], h[:, 5:]), both)
    apart = value_and_gradients(activation, both[:, :5].contiguous(), both[:, 5:].contiguous())
    assert_agree(together, [apart[0], torch.cat(apart[1:], dim=1)], 1e-15)


@pytest.mark.parametrize("activation", [SILU, SITU])
def test_extremes_stay_finite(activation: GluActivation) -> None:
    extreme = torch.tensor([-1e30, -1e4, -100.0, -0.0, 0.0, 100.0, 1e4])
    for tensor in value_and_gradients(activation, extreme, torch.full_like(extreme, 3.0)):
        assert bool(torch.isfinite(tensor).all())


@pytest.mark.parametrize("activation", [SILU, SITU, GluActivation("situ", 0.7)])
def test_gradcheck(activation: GluActivation) -> None:
    assert torch.autograd.gradcheck(activation, (normal(4, 3, seed=6).requires_grad_(), normal(4, 3, seed=7).requires_grad_()))


def test_only_gate_and_up_are_saved() -> None:
    gate, up = (normal(40, 30, seed=s, dtype=torch.float32).requires_grad_() for s in (8, 9))
    assert saved_bytes(lambda: SITU(gate, up)) == 2 * 40 * 30 * 4


def test_refusals() -> None:
    with pytest.raises(ValueError, match="gelu"):
        GluActivation("gelu")
    with pytest.raises(ValueError, match="differ in shape"):
        SITU(torch.zeros(3), torch.zeros(4))
