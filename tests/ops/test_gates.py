"""KDA's decay gate, l2 norm and gated output norm."""

from __future__ import annotations

import math

import pytest
import torch

from openk3.ops import backend
from openk3.ops.gates import gated_rms_norm, gated_rms_norm_reference, kda_gate, kda_gate_reference, l2norm, l2norm_reference
from tests.ops.compare import assert_same_op, normal, saved_bytes
from tests.support import oracle_json, oracle_tensors, worst

FORMS = ("reference", "torch")
DTYPES = [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 5e-2)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", ["lower_bound", "softplus"])
def test_gate_oracle(gate: str, form: str) -> None:
    stored, bound = oracle_tensors("ops"), oracle_json("ops")[f"gate.{gate}"]["lower_bound"]
    f, A_log, dt_bias = (stored[f"gate.{gate}.{name}"] for name in ("x", "A_log", "dt_bias"))
    wanted = stored[f"gate.{gate}.g_f64"][0]
    with backend.use(form):
        assert worst(kda_gate(f[0].double(), A_log.double(), dt_bias.double(), bound), wanted) <= 1e-9
        narrow = kda_gate(f[0], A_log, dt_bias, bound)
    assert narrow.dtype == torch.float32
    assert worst(narrow, wanted) <= 2e-6 * float(wanted.abs().max())


def test_the_two_gates_by_hand_differ() -> None:
    points = [-8.0, -2.0, -0.5, 0.0, 0.5, 2.0, 30.0]
    f = torch.tensor(points, dtype=torch.float64).view(7, 1, 1)
    A_log, bias = torch.tensor([math.log(2.0)], dtype=torch.float64), torch.tensor([0.25], dtype=torch.float64)
    bounded = kda_gate(f, A_log, bias, -5.0).flatten().tolist()
    unbounded = kda_gate(f, A_log, bias, None).flatten().tolist()
    assert bounded == pytest.approx([-5 / (1 + math.exp(-2 * (x + 0.25))) for x in points], abs=1e-12)
    # torch's softplus is its argument above 20.
    assert unbounded == pytest.approx([-2 * (x + 0.25 if x > 20 else math.log1p(math.exp(x + 0.25))) for x in points], abs=1e-12)
    # A clamp of the one is not the other.
    assert all(abs(a - max(b, -5.0)) > 1e-3 for a, b in zip(bounded[1:6], unbounded[1:6], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("lower_bound", [-0.1, -1.0, -5.0, -20.0, None])
def test_gate_is_finite_however_saturated(lower_bound: float | None, dtype: torch.dtype) -> None:
    A_log = torch.tensor([-20.0, 0.0, 10.0, 100.0], dtype=dtype, requires_grad=True)
    f = torch.tensor([-50.0, 0.0, 50.0], dtype=dtype).view(3, 1, 1).repeat(1, 4, 2).requires_grad_()
    dt_bias = torch.zeros(8, dtype=dtype, requires_grad=True)
    g = kda_gate(f, A_log, dt_bias, lower_bound)
    assert bool(torch.isfinite(g).all()) and bool((g <= 0).all())
    if lower_bound is not None:
        assert bool((g >= lower_bound).all())
    for grad in torch.autograd.grad(g, (f, A_log, dt_bias), torch.ones_like(g)):
        assert bool(torch.isfinite(grad).all())


@pytest.mark.parametrize("lower_bound", [-0.1, -1.0, -5.0, -20.0, None])
@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("shape", [(0, 2, 3), (1, 1, 1), (33, 3, 5), (700, 4, 64)])
def test_gate_is_its_reference(shape: tuple[int, int, int], dtype: torch.dtype, tolerance: float, lower_bound: float | None) -> None:
    T, H, K = shape
    inputs = [normal(T, H, K, seed=1, dtype=dtype), normal(H, seed=2).to(dtype), normal(H * K, seed=3).to(dtype)]

    def run(f, A_log, dt_bias):
        return kda_gate(f, A_log, dt_bias, lower_bound).to(dtype)

    assert_same_op(run, lambda f, A_log, dt_bias: kda_gate_reference(f, A_log, dt_bias, lower_bound), inputs, tolerance)


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("shape", [(0, 4), (3, 2), (5, 2, 7), (1500, 2, 96)])
def test_l2norm_is_its_reference(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    assert_same_op(l2norm, l2norm_reference, [normal(*shape, seed=1, dtype=dtype)], tolerance)


def test_l2norm_by_hand() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1e-4, 0.0]], dtype=torch.float64, requires_grad=True)
    y = l2norm(x)
    long, short = math.sqrt(25 + 1e-6), math.sqrt(1e-8 + 1e-6)
    assert y.flatten().tolist() == pytest.approx([3 / long, 4 / long, 0, 0, 1e-4 / short, 0])
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert dx[1].tolist() == pytest.approx([1e3, 1e3])


@pytest.mark.parametrize("form", FORMS)
def test_gated_norm_oracle(form: str) -> None:
    x, weight, gate = (oracle_tensors("ops")[f"gated_rmsnorm.{name}"] for name in ("x", "weight", "gate"))
    wanted = oracle_tensors("ops")["gated_rmsnorm.y_f64"]
    with backend.use(form):
        assert worst(gated_rms_norm(x.double(), weight.double(), gate.double(), 1e-5), wanted) <= 1e-9
        assert worst(gated_rms_norm(x, weight, gate, 1e-5), wanted) <= 2e-6


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("shape", [(0, 2, 4), (1, 1, 3), (5, 2, 7), (900, 2, 96)])
def test_gated_norm_is_its_reference(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    inputs = [normal(*shape, seed=1, dtype=dtype), normal(shape[-1], seed=2, dtype=dtype), normal(*shape, seed=3, dtype=dtype)]
    assert_same_op(lambda *given: gated_rms_norm(*given, 1e-5), lambda *given: gated_rms_norm_reference(*given, 1e-5), inputs, tolerance)


def test_gated_norm_casts_once() -> None:
    # x in fp32 (the op's output), the gate in bf16: the result is the fp32 one, rounded.
    x, weight, gate = normal(50, 2, 16, seed=1).float(), normal(16, seed=2).float(), normal(50, 2, 16, seed=3).bfloat16()
    y = gated_rms_norm(x, weight, gate, 1e-5)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, gated_rms_norm(x, weight, gate.float(), 1e-5).bfloat16())


def test_what_they_save() -> None:
    f, A_log, bias = normal(64, 2, 8, seed=1).requires_grad_(), torch.zeros(2, dtype=torch.float64), torch.zeros(16, dtype=torch.float64)
    small = 8 * (2 + 16 + 8)
    # f and the result.
    assert saved_bytes(lambda: kda_gate(f, A_log, bias, -5.0)) <= 2 * f.nbytes + small
    assert saved_bytes(lambda: l2norm(f)) <= f.nbytes
    gate = normal(64, 2, 8, seed=2).requires_grad_()
    assert saved_bytes(lambda: gated_rms_norm(f, torch.ones(8, dtype=torch.float64), gate, 1e-5)) <= 2 * f.nbytes + small


def test_shapes_that_do_not_fit_are_named() -> None:
    f = torch.zeros(3, 2, 4)
    with pytest.raises(ValueError, match=r"A_log \[H\]"):
        kda_gate(f, torch.zeros(3), torch.zeros(8), -5.0)
    with pytest.raises(ValueError, match="negative"):
        kda_gate(f, torch.zeros(2), torch.zeros(8), 5.0)
    with pytest.raises(ValueError, match=r"weight is \[V\]"):
        gated_rms_norm(f, torch.zeros(5), f, 1e-5)
