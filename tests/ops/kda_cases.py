"""Inputs for the tests of KDA, and one call of the op with all its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from openk3.ops.kda import kda_reference
from openk3.ops.segments import Segments
from tests.ops.compare import normal

# Short, at, and beyond each boundary of tiles of 16 and chunks of 16, 32 and 64.
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 130)
RAGGED = (40, 0, 17, 7, 1, 1, 70, 64, 63)

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    # From uniform numbers in (0, 1).
    "mixed": lambda u: -5 * u**4,
    "none": lambda u: torch.zeros_like(u),
    "strongest bounded": lambda u: torch.full_like(u, -5),
    "unbounded": lambda u: -30 * u**3,
    "huge": lambda u: -u - 1e4 * (u < 0.3).to(u.dtype),
}


@dataclass(frozen=True, eq=False)
class Case:
    """Arguments of the op, and the gradients of its two results."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    segments: Segments
    do: Tensor
    dfinal: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        rest = () if self.initial_state is None else (self.initial_state,)
        return (self.q, self.k, self.v, self.g, self.beta, *rest)


def make_case(
    lengths: Sequence[int],
    *,
    H: int = 2,
    K: int = 8,
    V: int = 12,
    gate: str = "mixed",
    state: bool = True,
    equal_keys: bool = False,
    seed: int = 0,
) -> Case:
    """A case in float64, the same object for the same arguments. `equal_keys`: every key is the first unit vector and beta is 1."""
    return _make_case(tuple(lengths), H, K, V, gate, state, equal_keys, seed)


@cache
def _make_case(lengths: tuple[int, ...], H: int, K: int, V: int, gate: str, state: bool, equal_keys: bool, seed: int) -> Case:
    segments = Segments.of(lengths)
    T, N = segments.total, segments.count
    uniform = torch.rand((T, H, K), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    q, k = (torch.nn.functional.normalize(normal(T, H, K, seed=seed + i), dim=-1) for i in (1, 2))
    beta = torch.sigmoid(normal(T, H, seed=seed + 3))
    if equal_keys:
        k, beta = torch.zeros_like(k), torch.ones_like(beta)
        k[..., 0] = 1
    return Case(
        q,
        k,
        normal(T, H, V, seed=seed + 4),
        GATES[gate](uniform),
        beta,
        normal(N, H, K, V, seed=seed + 5) if state else None,
        segments,
        normal(T, H, V, seed=seed + 6),
        normal(N, H, K, V, seed=seed + 7),
    )


def results(
    op: Callable[..., tuple[Tensor, Tensor]], case: Case, dtype: torch.dtype = torch.float64, lower_bound: float | None = None
) -> list[Tensor]:
    """o, the final state, and the gradient of each tensor of the case."""
    leaves = [t.to(dtype).requires_grad_() for t in (x.detach().clone() for x in case.tensors)]
    state = leaves[5] if len(leaves) > 5 else None
    o, final = op(*leaves[:5], case.segments, state, lower_bound=lower_bound)
    upstream = [(out, grad.to(out.dtype)) for out, grad in ((o, case.do), (final, case.dfinal)) if out.requires_grad]
    grads = torch.autograd.grad([out for out, _ in upstream], leaves, [grad for _, grad in upstream], allow_unused=True)
    return [o.detach(), final.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]


def without_gradient(
    op: Callable[..., tuple[Tensor, Tensor]], case: Case, dtype: torch.dtype = torch.float64, lower_bound: float | None = None
) -> list[Tensor]:
    """o and the final state of a call that asks for no gradient."""
    q, k, v, g, beta, *state = (t.to(dtype) for t in case.tensors)
    return list(op(q, k, v, g, beta, case.segments, state[0] if state else None, lower_bound=lower_bound))


@cache
def expected(case: Case) -> list[Tensor]:
    """What `results` should be: the recurrence in float64, with autograd's gradients."""
    return results(kda_reference, case)


def distance(actual: Tensor, wanted: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; absolute where that is 0."""
    assert actual.shape == wanted.shape
    difference, norm = (actual.double() - wanted.double()).norm(), wanted.double().norm()
    return float(difference / norm) if norm > 0 else float(difference)
