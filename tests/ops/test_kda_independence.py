"""KDA: no token sees a later one, no sequence another, and any split into calls gives the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from openk3.ops.kda import kda
from openk3.ops.segments import Segments
from tests.ops.kda_cases import Case, distance, expected, make_case, results, without_gradient

BOUNDS = [-5.0, None]


def changed(case: Case, name: str, rows: slice) -> Case:
    """The case with other numbers in some tokens of one input."""
    value = getattr(case, name).clone()
    value[rows] = value[rows] * 0.3 if name in ("g", "beta") else -value[rows] * 1.7
    return replace(case, **{name: value})


@pytest.mark.parametrize("lower_bound", BOUNDS)
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("length, at", [(22, 21), (22, 16), (130, 64), (130, 69)])
def test_causal_to_the_last_bit(length: int, at: int, name: str, lower_bound: float | None) -> None:
    for gate in ("mixed", "strongest bounded"):
        for dtype in (torch.float64, torch.float32):
            case = make_case([length], gate=gate, K=16)
            # The loss reads the outputs before `at` alone.
            case = replace(case, do=torch.cat([case.do[:at], torch.zeros_like(case.do[at:])]), dfinal=torch.zeros_like(case.dfinal))
            other = changed(case, name, slice(at, None))
            a, b = (without_gradient(kda, one, dtype, lower_bound)[0] for one in (case, other))
            assert torch.equal(a[:at], b[:at])
            o, _, *grads = results(kda, case, dtype, lower_bound)
            other_o, _, *other_grads = results(kda, other, dtype, lower_bound)
            assert torch.equal(o[:at], other_o[:at])
            for a, b in zip(grads[:5], other_grads[:5], strict=True):
                assert torch.equal(a[:at], b[:at])
                assert not a[at:].any() and not b[at:].any()
            assert torch.equal(grads[5], other_grads[5])


@pytest.mark.parametrize("lower_bound", BOUNDS)
@pytest.mark.parametrize("lengths", [(40, 50, 7), (64, 64), (70, 130, 0, 1, 20), (3, 5, 1)])
def test_packed_sequences_do_not_see_each_other(lengths: tuple[int, ...], lower_bound: float | None) -> None:
    case = make_case(lengths, H=3)
    for n, (start, length) in enumerate(zip(case.segments.starts, lengths, strict=True)):
        other = case
        for name in ("q", "k", "v", "g", "beta"):
            other = changed(other, name, slice(start, start + length))
        outside = torch.ones(case.segments.total, dtype=torch.bool)
        outside[start : start + length] = False
        others = torch.arange(len(lengths)) != n
        for dtype in (torch.float64, torch.float32):
            before, after = (results(kda, one, dtype, lower_bound) for one in (case, other))
            for position, (a, b) in enumerate(zip(before, after, strict=True)):
                keep = others if position in (1, 7) else outside
                assert torch.equal(a[keep], b[keep])


@pytest.mark.parametrize("lower_bound", BOUNDS)
@pytest.mark.parametrize("lengths", [[1, 1, 70, 1, 64, 63], [40, 50, 7], [0, 1, 0, 130], [1, 1, 1], [17, 33, 65, 16, 32, 64]])
def test_each_sequence_as_if_alone(lengths: list[int], lower_bound: float | None) -> None:
    case = make_case(lengths)
    together = (results(kda, case, lower_bound=lower_bound), without_gradient(kda, case, lower_bound=lower_bound))
    for n, (start, length) in enumerate(zip(case.segments.starts, lengths, strict=True)):
        span = slice(start, start + length)
        own = slice(n, n + 1)
        tensors = (t[span] for t in case.tensors[:5])
        alone = Case(*tensors, case.initial_state[own], Segments.of([length]), case.do[span], case.dfinal[own])
        for everyone in together:
            for position, (a, b) in enumerate(zip(everyone, expected(alone), strict=False)):
                assert distance(a[own] if position in (1, 7) else a[span], b) <= 1e-12


@pytest.mark.parametrize("lower_bound", BOUNDS)
def test_every_split_gives_the_same(lower_bound: float | None) -> None:
    case = make_case([130], H=1, K=8, V=12)
    whole_o, whole_state = without_gradient(kda, case, lower_bound=lower_bound)
    for split in range(1, 130):
        parts, state = [], case.initial_state
        for span in (slice(0, split), slice(split, 130)):
            o, state = kda(*(t[span] for t in case.tensors[:5]), Segments.of([span.stop - span.start]), state, lower_bound=lower_bound)
            parts.append(o)
        assert distance(torch.cat(parts), whole_o) <= 1e-12
        assert distance(state, whole_state) <= 1e-12


@pytest.mark.parametrize("size", [1, 3, 16, 64])
def test_pieces_of_one_size_with_gradient(size: int) -> None:
    case = make_case([130], H=1)
    wanted = expected(case)
    leaves = [t.detach().clone().requires_grad_() for t in case.tensors]
    outputs, state = [], leaves[5]
    for start in range(0, 130, size):
        pieces = [t[start : start + size] for t in leaves[:5]]
        o, state = kda(*pieces, Segments.of([pieces[0].shape[0]]), state, lower_bound=-5.0)
        outputs.append(o)
    grads = torch.autograd.grad((torch.cat(outputs), state), leaves, (case.do, case.dfinal))
    for actual, right in zip([torch.cat(outputs).detach(), state.detach(), *grads], wanted, strict=True):
        assert distance(actual, right) <= 1e-12


def test_no_state_is_a_state_of_zeros_for_each_sequence() -> None:
    case = make_case([5, 70, 1], state=False)
    q, k, v, g, beta = case.tensors
    zeros = torch.zeros(3, 2, 8, 12, dtype=torch.float64)
    for without, explicit in zip(kda(q, k, v, g, beta, case.segments), kda(q, k, v, g, beta, case.segments, zeros), strict=True):
        assert distance(without, explicit) <= 1e-14
    assert kda(q, k, v, g, beta, case.segments)[1].shape == zeros.shape


def test_seventy_thousand_sequences_of_one_token() -> None:
    N = 70_000
    case = make_case([1] * N, H=1, K=2, V=3)
    q, k, v, g, beta, state = case.tensors
    decayed = state * g.exp()[..., None]
    error = v - torch.einsum("nhkv,nhk->nhv", decayed, k)
    wanted = decayed + torch.einsum("nh,nhk,nhv->nhkv", beta, k, error)
    o, final = kda(q, k, v, g, beta, case.segments, state)
    assert distance(final, wanted) <= 1e-14
    assert distance(o, torch.einsum("nhkv,nhk->nhv", wanted, q) * 2**-0.5) <= 1e-14
    leaf = v.clone().requires_grad_()
    o, final = kda(q, k, leaf, g, beta, case.segments, state)
    assert distance(final.detach(), wanted) <= 1e-14
    (dv,) = torch.autograd.grad(final, leaf, torch.ones_like(final))
    assert distance(dv, (beta[..., None] * k).sum(-1, keepdim=True).expand_as(v)) <= 1e-14
