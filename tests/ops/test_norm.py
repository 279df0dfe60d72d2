"""RMSNorm against its formula."""

from __future__ import annotations

import pytest
import torch

from openk3.ops.norm import rms_norm, rms_norm_reference
from tests.ops.compare import assert_same_op, normal, saved_bytes, value_and_gradients
from tests.support import worst


@pytest.mark.parametrize("form", [rms_norm, rms_norm_reference])
def test_by_hand(form) -> None:
    # mean(3² + 4²)/2 = 12.5; with eps 3.5 the divisor is 4.
    y = form(torch.tensor([[3.0, 4.0]], dtype=torch.float64), torch.tensor([2.0, -1.0], dtype=torch.float64), 3.5)
    assert y.tolist() == [[1.5, -1.0]]


@pytest.mark.parametrize("shape", [(0, 5), (1, 2), (7, 3), (2, 3, 11), (2000, 130)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_fast_is_reference(shape: tuple[int, ...], dtype: torch.dtype, tolerance: float) -> None:
    inputs = [normal(*shape, seed=1, dtype=dtype), normal(shape[-1], seed=2, dtype=dtype)]
    assert_same_op(lambda x, w: rms_norm(x, w, 1e-5), lambda x, w: rms_norm_reference(x, w, 1e-5), inputs, tolerance)


@pytest.mark.parametrize("form", [rms_norm, rms_norm_reference])
def test_the_cast_comes_before_the_weight(form) -> None:
    x, weight = normal(64, 33, seed=3, dtype=torch.bfloat16), normal(33, seed=4, dtype=torch.bfloat16)
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    assert torch.equal(form(x, weight, 1e-6), normalised.bfloat16() * weight)


def test_statistics_are_taken_in_fp32() -> None:
    # 2⁻⁸ vanishes beside 1 in bf16, so sums taken in bf16 would leave these 4095 squares out.
    x = torch.full((1, 4096), 2.0**-8, dtype=torch.bfloat16)
    x[0, 0] = 16.0
    expected = 16.0 / ((256 + 4095 * 2.0**-16) / 4096 + 1e-6) ** 0.5
    assert float(rms_norm(x, torch.ones(4096, dtype=torch.bfloat16), 1e-6)[0, 0]) == pytest.approx(expected, rel=2**-8)


def test_a_transposed_input() -> None:
    x, weight = normal(5, 7, seed=5), normal(5, seed=6)
    assert worst(rms_norm(x.t(), weight, 1e-5), rms_norm_reference(x.t().contiguous(), weight, 1e-5)) < 1e-14


def test_a_fp32_weight_on_a_bf16_input_keeps_the_dtype_of_the_input() -> None:
    x, weight = normal(9, 8, seed=7, dtype=torch.bfloat16), normal(8, seed=8, dtype=torch.float32)
    fast = value_and_gradients(lambda x, w: rms_norm(x, w, 1e-5), x, weight)
    assert [tensor.dtype for tensor in fast] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_zeros_stay_finite() -> None:
    for tensor in value_and_gradients(lambda x, w: rms_norm(x, w, 1e-6), torch.zeros(3, 4), torch.ones(4)):
        assert bool(torch.isfinite(tensor).all())


def test_gradcheck() -> None:
    x, weight = normal(3, 5, seed=9).requires_grad_(), normal(5, seed=10).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-2), (x, weight))


def test_one_number_a_row_is_saved_beside_x() -> None:
    x, weight = normal(50, 30, seed=11, dtype=torch.float32).requires_grad_(), torch.ones(30, requires_grad=True)
    assert saved_bytes(lambda: rms_norm(x, weight, 1e-5)) == 4 * (50 * 30 + 30 + 50)


def test_a_wrong_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[4\]"):
        rms_norm(torch.zeros(2, 4), torch.ones(3), 1e-5)
