"""KDA's backward recomputes: what a graph holds grows with T·H·(K + V), not with T·H·C·K."""

from __future__ import annotations

import pytest
import torch

from openk3.ops.kda import kda, kda_chunk
from openk3.ops.segments import Segments
from tests.ops.compare import saved_bytes
from tests.ops.kda_cases import make_case


@pytest.mark.parametrize("lengths", [[1024], [100, 3, 0, 400, 21]])
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_saved_bytes(lengths: list[int], lower_bound: float | None) -> None:
    H, K, V = 2, 32, 32
    case = make_case(lengths, H=H, K=K, V=V)
    leaves = [t.float().requires_grad_() for t in case.tensors]
    T, N = case.segments.total, case.segments.count
    inputs = 4 * (T * H * (3 * K + V + 1) + N * H * K * V)
    kept = saved_bytes(lambda: kda(*leaves[:5], case.segments, leaves[5], lower_bound=lower_bound)) - inputs
    # One error a token, and one state for each chunk of 64 after a sequence's first.
    chunks = sum(-(-length // 64) - 1 for length in lengths if length)
    assert kept <= 4 * H * (T * V + chunks * K * V)
    assert kept <= 4 * T * H * (K + V)


def test_a_second_derivative_is_refused() -> None:
    case = make_case([5])
    leaf = case.v.clone().requires_grad_()
    o, _ = kda_chunk(case.q, case.k, leaf, case.g, case.beta, case.segments)
    (grad,) = torch.autograd.grad(o.square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


def test_no_graph_without_gradient() -> None:
    case = make_case([70])
    o, final = kda(*case.tensors[:5], case.segments, case.tensors[5])
    assert not o.requires_grad and not final.requires_grad
    with torch.no_grad():
        o, final = kda(case.q.requires_grad_(), *case.tensors[1:5], case.segments)
    assert not o.requires_grad and not final.requires_grad


def test_results_are_the_same_each_time() -> None:
    case = make_case([200, 70, 1], H=3, K=16, V=16)
    tensors = [t.float() for t in case.tensors]
    first, second = (kda(*tensors[:5], case.segments, tensors[5], lower_bound=-5.0) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert Segments.of([200, 70, 1]).lengths == case.segments.lengths
