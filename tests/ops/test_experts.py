"""Routed experts against a loop over tokens, and packed documents that must not see each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openk3.ops.activation import GluActivation
from openk3.ops.experts import expert_mlp, expert_mlp_reference
from tests.ops.compare import assert_agree, assert_same_op, generator, normal, saved_bytes, threads, value_and_gradients
from tests.support import worst

SITU, SILU = GluActivation("situ", 4.0, 25.0), GluActivation("silu")


def choices(tokens: int, k: int, experts: int, seed: int = 0) -> Tensor:
    """`[T, k]` different ids, ascending."""
    return torch.rand(tokens, experts, generator=generator(seed)).topk(k, dim=1).indices.sort(1).values


def inputs(tokens: int, k: int, experts: int, width: int, inner: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """x, weights, w13, w2."""
    wide = torch.promote_types(dtype, torch.float32)
    return [
        normal(tokens, width, seed=1, dtype=dtype),
        torch.rand(tokens, k, generator=generator(2), dtype=torch.float64).to(wide),
        normal(experts, 2 * inner, width, seed=3, dtype=dtype) / width**0.5,
        normal(experts, width, inner, seed=4, dtype=dtype) / inner**0.5,
    ]


def op_of(form, ids: Tensor, activation: GluActivation = SITU):
    return lambda x, weights, w13, w2: form(x, ids, weights, w13, w2, activation)


def token_by_token(ids: Tensor, activation: GluActivation):
    """Shares nothing with either form: one token and one choice at a time, autograd for the gradients."""

    def run(x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
        rows = []
        for t in range(x.shape[0]):
            total = torch.zeros_like(x[t])
            for j, expert in enumerate(ids[t].tolist()):
                inner = w2.shape[2]
                gate, up = w13[expert, :inner] @ x[t], w13[expert, inner:] @ x[t]
                if activation.name == "silu":
                    hidden = gate / (1 + torch.exp(-gate)) * up
                else:
                    hidden = 4 * torch.tanh(gate / 4) / (1 + torch.exp(-gate)) * 25 * torch.tanh(up / 25)
                total = total + weights[t, j] * (w2[expert] @ hidden)
            rows.append(total)
        return torch.stack(rows) if rows else x[:0]

    return run


@pytest.mark.parametrize("form", [expert_mlp, expert_mlp_reference])
@pytest.mark.parametrize("activation", [SITU, SILU])
@pytest.mark.parametrize("tokens, k, experts", [(0, 2, 5), (1, 3, 3), (2, 1, 9), (13, 3, 7), (30, 4, 4)])
def test_token_by_token(form, activation: GluActivation, tokens: int, k: int, experts: int) -> None:
    ids = choices(tokens, k, experts)
    assert_same_op(op_of(form, ids, activation), token_by_token(ids, activation), inputs(tokens, k, experts, 6, 5), 1e-12)


@pytest.mark.parametrize("tokens, k, experts, width, inner", [(100, 4, 16, 24, 8), (257, 2, 3, 17, 33), (20, 16, 896, 8, 4)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 2e-5), (torch.bfloat16, 2e-1)])
def test_fast_is_reference(tokens: int, k: int, experts: int, width: int, inner: int, dtype: torch.dtype, tolerance: float) -> None:
    ids = choices(tokens, k, experts)
    given = inputs(tokens, k, experts, width, inner, dtype)
    assert_same_op(op_of(expert_mlp, ids), op_of(expert_mlp_reference, ids), given, tolerance)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 12), st.integers(1, 6), st.integers(1, 6), st.integers(0, 1000))
def test_any_size_and_repeated_ids(tokens: int, k: int, experts: int, seed: int) -> None:
    ids = torch.randint(experts, (tokens, k), generator=generator(seed))
    given = inputs(tokens, k, experts, 3, 2)
    assert_same_op(op_of(expert_mlp, ids), op_of(expert_mlp_reference, ids), given, 1e-11)


def test_gradcheck() -> None:
    ids = choices(4, 2, 5)
    assert torch.autograd.gradcheck(op_of(expert_mlp, ids), [tensor.requires_grad_() for tensor in inputs(4, 2, 5, 3, 2)])


@pytest.mark.parametrize("ids", [[[0], [0]], [[6], [6]], [[0, 6], [0, 6]]])
def test_the_first_and_the_last_expert_count(ids: list[list[int]]) -> None:
    chosen = torch.tensor(ids)
    given = inputs(2, chosen.shape[1], 7, 4, 3)
    got = value_and_gradients(op_of(expert_mlp, chosen), *given)
    assert_agree(got, value_and_gradients(token_by_token(chosen, SITU), *given), 1e-12)
    for gradient in got[3:]:
        assert sorted(gradient.flatten(1).any(1).nonzero().flatten().tolist()) == sorted(set(chosen.flatten().tolist()))


def test_experts_without_tokens_get_zeros_and_not_none() -> None:
    x, weights, w13, w2 = (tensor.requires_grad_() for tensor in inputs(3, 1, 4, 5, 2))
    expert_mlp(x, torch.full((3, 1), 2), weights, w13, w2, SILU).sum().backward()
    assert w13.grad is not None and w2.grad is not None
    assert [bool(g.any()) for g in w13.grad] == [bool(g.any()) for g in w2.grad] == [False, False, True, False]
    for tensor in (x, weights, w13, w2):
        tensor.grad = None
    expert_mlp(x[:0], torch.zeros(0, 1, dtype=torch.int64), weights[:0], w13, w2, SILU).sum().backward()
    assert w13.grad is not None and not w13.grad.any() and w13.grad.shape == w13.shape


def test_only_the_wanted_gradients() -> None:
    x, weights, w13, w2 = inputs(6, 2, 4, 5, 3)
    ids = choices(6, 2, 4)
    full = value_and_gradients(op_of(expert_mlp, ids), x, weights, w13, w2)
    for position, tensor in enumerate((x, weights, w13, w2)):
        tensor.requires_grad_()
        out = expert_mlp(x, ids, weights, w13, w2, SITU)
        (gradient,) = torch.autograd.grad(out, [tensor], normal(*out.shape, seed=99))
        assert worst(gradient, full[1 + position]) < 1e-13
        tensor.requires_grad_(False)


def test_the_weighted_sum_is_taken_in_fp32() -> None:
    """1 + 2⁻⁹ − 1 = 2⁻⁹: the middle term is lost when the sum is rounded to bf16 on the way."""
    x, w13, w2 = torch.ones(1, 1), torch.ones(3, 2, 1), torch.ones(3, 1, 1)
    one = float(SILU(torch.ones(1), torch.ones(1)).bfloat16())
    weights = torch.tensor([[1 / one, 2.0**-9 / one, -1 / one]])
    for form in (expert_mlp, expert_mlp_reference):
        out = form(x.bfloat16(), torch.tensor([[0, 1, 2]]), weights, w13.bfloat16(), w2.bfloat16(), SILU)
        assert out.dtype == torch.bfloat16 and float(out) == pytest.approx(2.0**-9, rel=1e-4)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first, tokens, k, experts, width, inner", [(37, 90, 4, 16, 96, 24), (5, 12, 2, 4, 20, 12), (1, 2, 3, 8, 8, 8)])
def test_packed_documents_do_not_see_each_other(
    first: int, tokens: int, k: int, experts: int, width: int, inner: int, dtype: torch.dtype, count: int
) -> None:
    """To the bit: the first document changes its numbers, its routing and so the number of rows beside the second one's.

    Widths are multiples of 4: of another width the last columns are computed by kernels that know a row's place.
    """
    x, weights, w13, w2 = inputs(tokens, k, experts, width, inner, dtype)
    ids = choices(tokens, k, experts)
    with threads(count):
        before = value_and_gradients(op_of(expert_mlp, ids), x, weights, w13, w2)
        for seed in range(1, 9 if count == 1 else 3):
            other_ids, other_x, other_weights = ids.clone(), x.clone(), weights.clone()
            other_ids[:first] = choices(first, k, experts, seed) if seed > 1 else torch.arange(k)
            other_x[:first] = 5 * normal(first, width, seed=seed, dtype=dtype)
            other_weights[:first] *= 2
            after = value_and_gradients(op_of(expert_mlp, other_ids), other_x, other_weights, w13, w2)
            for one, other in zip(before[:3], after[:3], strict=True):
                assert torch.equal(one[first:], other[first:])


def test_saved_are_the_inputs_and_the_permutation() -> None:
    tokens, k, experts, width, inner = 64, 2, 4, 16, 32
    x, weights, w13, w2 = (tensor.requires_grad_() for tensor in inputs(tokens, k, experts, width, inner, torch.float32))
    rows = tokens * k + 8 * experts  # padding included
    bound = 4 * (x.numel() + weights.numel() + w13.numel() + w2.numel()) + 8 * (tokens * k + rows)
    assert saved_bytes(lambda: expert_mlp(x, choices(tokens, k, experts), weights, w13, w2, SITU)) <= bound


def test_refusals() -> None:
    x, weights, w13, w2 = inputs(3, 2, 4, 6, 5)
    ids = choices(3, 2, 4)
    for bad in (-1, 4):
        wrong = ids.clone()
        wrong[1, 0] = bad
        with pytest.raises(ValueError, match="4 experts"):
            expert_mlp(x, wrong, weights, w13, w2, SITU)
    with pytest.raises(ValueError, match="do not fit"):
        expert_mlp(x, ids, weights, w13[:, :8], w2, SITU)
    with pytest.raises(ValueError, match=r"\[T, k\]"):
        expert_mlp(x, ids[:2], weights, w13, w2, SITU)
    with pytest.raises(ValueError, match="agree"):
        expert_mlp(x.float(), ids, weights, w13, w2, SITU)
