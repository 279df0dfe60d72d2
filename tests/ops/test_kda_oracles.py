"""KDA, with its gates and norms, against numbers of the release's own reference code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from openk3.ops import backend
from openk3.ops.gates import kda_gate, l2norm
from openk3.ops.kda import kda
from openk3.ops.segments import Segments
from tests.support import oracle_json, oracle_tensors, worst

CASES = sorted(name for name in oracle_json("ops") if name.startswith("kda."))
FORMS = ("reference", "torch")


def tensor(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """An oracle's tensor, batch and time flattened where it has both."""
    return oracle_tensors("ops")[name].to(dtype)


def flat(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return tensor(name, dtype).flatten(0, 1)


def batch(name: str) -> Segments:
    sequences, length = oracle_tensors("ops")[name].shape[:2]
    return Segments.of([length] * sequences)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lower_bound", [-5.0, None])
@pytest.mark.parametrize("case", CASES)
def test_every_case(case: str, lower_bound: float | None, form: str) -> None:
    spec = oracle_json("ops")[case]
    for dtype, suffix, tolerance in ((torch.float64, "f64", 1e-9), (torch.float32, "f64", 2e-5)):
        q, k, v, g, beta = (flat(f"{case}.{name}", dtype) for name in ("q", "k", "v", "g", "beta"))
        state = tensor(f"{case}.initial_state", dtype) if spec["initial_state"] else None
        with backend.use(form):
            o, final = kda(q, k, v, g, beta, batch(f"{case}.q"), state, scale=spec["scale"], lower_bound=lower_bound)
        wanted_o, wanted_final = flat(f"{case}.o_{suffix}"), tensor(f"{case}.state_{suffix}")
        assert worst(o, wanted_o) <= tolerance * max(1.0, float(wanted_o.abs().max()))
        assert worst(final, wanted_final) <= tolerance * max(1.0, float(wanted_final.abs().max()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gradients(lower_bound: float | None, form: str) -> None:
    names = ("q", "k", "v", "g", "beta")
    leaves = [flat(f"kda_grad.{name}").requires_grad_() for name in names]
    state = tensor("kda_grad.initial_state").requires_grad_()
    with backend.use(form):
        o, final = kda(*leaves, batch("kda_grad.q"), state, lower_bound=lower_bound)
    assert worst(o.detach(), flat("kda_grad.o_f64")) <= 1e-9
    assert worst(final.detach(), tensor("kda_grad.state_f64")) <= 1e-9
    grads = torch.autograd.grad((o, final), [*leaves, state], (flat("kda_grad.do"), tensor("kda_grad.dstate")))
    for name, grad in zip(names, grads, strict=False):
        assert worst(grad, flat(f"kda_grad.d{name}_f64")) <= 1e-9, name
    assert worst(grads[-1], tensor("kda_grad.dinitial_state_f64")) <= 1e-9


def layer_maths(case: str, lower_bound: float | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The op from what the projections give: l2 norm, gate and sigmoid before it. Also returns the leaves."""
    leaves = [flat(f"{case}.{name}", dtype).requires_grad_() for name in ("q", "k", "v", "g", "beta")]
    leaves += [tensor(f"{case}.{name}", dtype).requires_grad_() for name in ("A_log", "dt_bias", "initial_state")]
    q, k, v, f, logits, A_log, dt_bias, state = leaves
    g = kda_gate(f, A_log, dt_bias, lower_bound)
    o, final = kda(l2norm(q), l2norm(k), v, g, torch.sigmoid(logits), batch(f"{case}.q"), state, lower_bound=lower_bound)
    return o, final, leaves


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
def test_with_gate_and_norms(gate: str, form: str) -> None:
    case = f"kda_full.{gate}"
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-5)):
        with backend.use(form):
            o, final, _ = layer_maths(case, oracle_json("ops")[case]["lower_bound"], dtype)
        assert worst(o.detach(), flat(f"{case}.o_f64")) <= tolerance
        assert worst(final.detach(), tensor(f"{case}.state_f64")) <= tolerance


@pytest.mark.parametrize("form", FORMS)
def test_gradients_with_gate_and_norms(form: str) -> None:
    with backend.use(form):
        o, _, leaves = layer_maths("kda_full_grad", -5.0, torch.float64)
    assert worst(o.detach(), flat("kda_full_grad.o_f64")) <= 1e-9
    grads = torch.autograd.grad(o, leaves, flat("kda_full_grad.do"))
    for name, grad in zip(("q", "k", "v", "g", "beta"), grads, strict=False):
        assert worst(grad, flat(f"kda_full_grad.d{name}_f64")) <= 1e-9, name
    for name, grad in zip(("A_log", "dt_bias", "initial_state"), grads[5:], strict=True):
        assert worst(grad, tensor(f"kda_full_grad.d{name}_f64")) <= 1e-9, name
