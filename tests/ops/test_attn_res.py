"""Mixing of residual sources against the release's numbers and the formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from openk3.ops.attn_res import attn_res_mix, attn_res_mix_reference, attn_res_weights, attn_res_weights_reference
from tests.ops.compare import assert_agree, assert_same_op, normal, saved_bytes, value_and_gradients
from tests.support import oracle_json, oracle_tensors, worst

CASES = sorted(case for case in oracle_json("ops") if case.startswith("attnres."))


def oracle(case: str, key: str) -> Tensor:
    return oracle_tensors("ops")[f"{case}.{key}"]


def sources_of(case: str, dtype: torch.dtype) -> list[Tensor]:
    return [*oracle(case, "blocks").to(dtype).unbind(1), oracle(case, "prefix").to(dtype)]


@pytest.mark.parametrize("form", [attn_res_mix, attn_res_mix_reference])
@pytest.mark.parametrize("case", CASES)
def test_mix_is_the_release(case: str, form) -> None:
    norm, proj, eps = oracle(case, "norm_weight"), oracle(case, "proj_weight"), oracle_json("ops")[case]["eps"]
    assert worst(form(sources_of(case, torch.float64), norm.double(), proj.double(), eps), oracle(case, "y_f64")) < 1e-9
    assert worst(form(sources_of(case, torch.float32), norm, proj, eps), oracle(case, "y_f32")) < 1e-5


@pytest.mark.parametrize("form", [attn_res_weights, attn_res_weights_reference])
@pytest.mark.parametrize("case", CASES)
def test_weights_are_the_release(case: str, form) -> None:
    norm, proj, eps = oracle(case, "norm_weight").double(), oracle(case, "proj_weight").double(), oracle_json("ops")[case]["eps"]
    assert worst(form(sources_of(case, torch.float64), norm, proj, eps), oracle(case, "probs_f64")) < 1e-9


def inputs(count: int, tokens: int, width: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [
        normal(width, seed=1, dtype=dtype),
        normal(1, width, seed=2, dtype=dtype) / width**0.5,
        *(normal(tokens, width, seed=3 + j, dtype=dtype) * (1 + j) for j in range(count)),
    ]


def mix(norm: Tensor, proj: Tensor, *sources: Tensor) -> Tensor:
    return attn_res_mix(sources, norm, proj, 1e-5)


def mix_reference(norm: Tensor, proj: Tensor, *sources: Tensor) -> Tensor:
    return attn_res_mix_reference(sources, norm, proj, 1e-5)


@pytest.mark.parametrize("count, tokens, width", [(1, 5, 7), (2, 1, 3), (3, 0, 4), (4, 700, 131), (9, 33, 17)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 3e-5), (torch.bfloat16, 4e-2)])
def test_fast_is_reference(count: int, tokens: int, width: int, dtype: torch.dtype, tolerance: float) -> None:
    given = inputs(count, tokens, width, dtype)
    if count == 1:  # the weight of a lone source is 1 whatever the query: its gradient is rounding on one side and zero on the other
        fast, plain = value_and_gradients(mix, *given), value_and_gradients(mix_reference, *given)
        assert torch.equal(fast[0], given[2]) and torch.equal(fast[3], plain[3]) and not fast[1].any() and not fast[2].any()
        return
    assert_same_op(mix, mix_reference, given, tolerance)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_gradcheck(count: int) -> None:
    assert torch.autograd.gradcheck(mix, [tensor.requires_grad_() for tensor in inputs(count, 4, 5)])


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_a_zero_query_averages_uniformly(count: int) -> None:
    norm, proj, *sources = inputs(count, 6, 8)
    assert worst(attn_res_mix(sources, norm, torch.zeros_like(proj), 1e-5), torch.stack(sources).mean(0)) < 1e-13
    weights = attn_res_weights(sources, norm, torch.zeros_like(proj), 1e-5)
    assert worst(weights, torch.full((6, count), 1 / count, dtype=torch.float64)) < 1e-15
    gradients = value_and_gradients(mix, norm, torch.zeros_like(proj), *sources)
    assert (count == 1) == (not gradients[2].any()), "a zero query must be able to learn"


@pytest.mark.parametrize("form", [attn_res_mix, attn_res_mix_reference])
@pytest.mark.parametrize("grad", [True, False])
def test_never_an_input_itself(form, grad: bool) -> None:
    norm, proj, source = inputs(1, 3, 4)
    out = form([source.requires_grad_(grad)], norm, proj, 1e-5)
    assert out is not source and out.data_ptr() != source.data_ptr()


def test_one_tensor_as_two_sources() -> None:
    norm, proj, source = inputs(1, 3, 4)
    twice = value_and_gradients(lambda n, p, s: mix(n, p, s, s), norm, proj, source)
    assert_agree(twice, value_and_gradients(lambda n, p, s: mix_reference(n, p, s, s), norm, proj, source), 1e-11)


def test_only_the_wanted_gradients() -> None:
    norm, proj, first, second = inputs(2, 3, 4)
    second.requires_grad_()
    mix(norm, proj, first, second).sum().backward()
    assert first.grad is None and second.grad is not None


def test_saved_are_the_sources_and_three_numbers_a_token_and_source() -> None:
    given = [tensor.requires_grad_() for tensor in inputs(9, 50, 40, torch.bfloat16)]
    assert saved_bytes(lambda: mix(*given)) == 2 * sum(tensor.numel() for tensor in given) + 3 * 4 * 50 * 9


def test_a_token_depends_on_itself_alone() -> None:
    norm, proj, *sources = inputs(3, 400, 200, torch.float32)
    before = mix(norm, proj, *sources)
    for source in sources:
        source[:7] = 5.0
    assert torch.equal(mix(norm, proj, *sources)[7:], before[7:])


def test_refusals() -> None:
    norm, proj = torch.ones(4), torch.ones(1, 4)
    with pytest.raises(ValueError, match="no residual source"):
        attn_res_mix([], norm, proj, 1e-5)
    with pytest.raises(ValueError, match="differ in shape"):
        attn_res_mix([torch.ones(3, 4), torch.ones(2, 4)], norm, proj, 1e-5)
    with pytest.raises(ValueError, match="width 4"):
        attn_res_mix([torch.ones(3, 4)], norm, torch.ones(4), 1e-5)
