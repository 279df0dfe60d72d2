"""Gated activations: SiTU-GLU, bounded in both factors, and SwiGLU (Kimi K3 report §2.3.2). Letters: P rows, F width."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import pick
from openk3.ops.precision import accumulation_dtype

# Elements that one pass handles: the handful of temporaries of a pass then stay in the cache.
_BLOCK = 1 << 17


def situ_glu_reference(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """`β·tanh(gate/β)·σ(gate) · λ·tanh(up/λ)` in fp32 with one cast at the end; λ = `linear_beta`, None leaves `up` untouched."""
    acc = accumulation_dtype(gate, up)
    g, u = gate.to(acc), up.to(acc)
    bounded_up = u if linear_beta is None else linear_beta * torch.tanh(u / linear_beta)
    return (beta * torch.tanh(g / beta) * torch.sigmoid(g) * bounded_up).to(gate.dtype)


def swiglu_reference(gate: Tensor, up: Tensor) -> Tensor:
    """`gate·σ(gate)·up` in fp32 with one cast at the end."""
    acc = accumulation_dtype(gate, up)
    g, u = gate.to(acc), up.to(acc)
    return (g * torch.sigmoid(g) * u).to(gate.dtype)


def situ_glu(gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """SiTU-GLU of `gate` and `up` of one shape, in `gate.dtype`; at most `beta · linear_beta` in magnitude.

    σ sees the unbounded gate. `linear_beta=None` leaves `up` unbounded. Only `gate` and `up` are saved for the backward.
    """
    return GluActivation("situ", beta, linear_beta)(gate, up)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU of `gate` and `up` of one shape, in `gate.dtype`. Only `gate` and `up` are saved for the backward."""
    return GluActivation("silu")(gate, up)


@dataclass(frozen=True)
class GluActivation:
    """A gated activation by name: "situ" (bounded by `beta` and `linear_beta`) or "silu" (SwiGLU; the bounds are not used)."""

    name: str
    beta: float = 1.0
    linear_beta: float | None = None

    def __post_init__(self) -> None:
        if self.name not in ("situ", "silu"):
            raise ValueError(f"activation {self.name!r} is not known; it is 'situ' or 'silu'")

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """The activation of `gate` and `up` of one shape, in `gate.dtype`. Differentiable."""
        if gate.shape != up.shape:
            raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} differ in shape")
        return pick({"reference": self._reference, "torch": self._fast}, gate)(gate, up)

    def into(self, gate_PF: Tensor, up_PF: Tensor, out_PF: Tensor) -> None:
        """Write the activation of rows `[P, F]` to `out`, block by block."""
        acc = accumulation_dtype(gate_PF, up_PF)
        for rows in _row_blocks(gate_PF):
            g, u = gate_PF[rows].to(acc), up_PF[rows].to(acc)
            if self.name == "silu":
                gated = torch.nn.functional.silu(g)
            else:
                gated = torch.div(g, self.beta).tanh_().mul_(self.beta).mul_(torch.sigmoid(g))
                if self.linear_beta is not None:
                    u = torch.div(u, self.linear_beta).tanh_().mul_(self.linear_beta)
            out_PF[rows] = gated.mul_(u)

    def gradients_into(
        self, grad_PF: Tensor, gate_PF: Tensor, up_PF: Tensor, dgate_PF: Tensor, dup_PF: Tensor, value_PF: Tensor | None = None
    ) -> None:
        """Write the gradients of `gate` and `up` for the output's gradient `grad`, and the activation itself to `value` if given.

        `dgate` and `dup` may be `gate` and `up` themselves; `value` may be `grad` itself.
        """
        acc = accumulation_dtype(gate_PF, up_PF)
        for rows in _row_blocks(gate_PF):
            g, u, dy = gate_PF[rows].to(acc), up_PF[rows].to(acc), grad_PF[rows].to(acc)
            dgate, dup, gated, bounded = self._swiglu_gradients(dy, g, u) if self.name == "silu" else self._situ_gradients(dy, g, u)
            if value_PF is not None:
                value_PF[rows] = gated.mul_(bounded)
            dgate_PF[rows] = dgate
            dup_PF[rows] = dup

    @staticmethod
    def _swiglu_gradients(dy: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gated = torch.nn.functional.silu(g)
        return torch.ops.aten.silu_backward(dy * u, g), dy * gated, gated, u

    def _situ_gradients(self, dy: Tensor, g: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        tanh, sigmoid = torch.div(g, self.beta).tanh_(), torch.sigmoid(g)
        gated = (tanh * sigmoid).mul_(self.beta)
        if self.linear_beta is None:
            bounded, dup = u, dy * gated
        else:
            bounded = torch.div(u, self.linear_beta).tanh_()
            dup = torch.ops.aten.tanh_backward(dy * gated, bounded)
            bounded.mul_(self.linear_beta)
        dgated = dy * bounded
        # d(β tanh(g/β) σ(g)) / dg = (1 − tanh²) σ + β tanh · σ (1 − σ)
        dgate = torch.ops.aten.tanh_backward(dgated * sigmoid, tanh)
        dgate.add_(torch.ops.aten.sigmoid_backward(dgated.mul_(tanh), sigmoid), alpha=self.beta)
        return dgate, dup, gated, bounded

    def _reference(self, gate: Tensor, up: Tensor) -> Tensor:
        return swiglu_reference(gate, up) if self.name == "silu" else situ_glu_reference(gate, up, self.beta, self.linear_beta)

    def _fast(self, gate: Tensor, up: Tensor) -> Tensor:
        return _Glu.apply(gate, up, self)


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: GluActivation) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        out = torch.empty_like(gate, memory_format=torch.contiguous_format)
        activation.into(_as_rows(gate), _as_rows(up), _as_rows(out))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        dgate = torch.empty_like(gate, memory_format=torch.contiguous_format)
        dup = torch.empty_like(up, memory_format=torch.contiguous_format)
        ctx.activation.gradients_into(_as_rows(grad), _as_rows(gate), _as_rows(up), _as_rows(dgate), _as_rows(dup))
        return dgate, dup, None


def _as_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]) if x.dim() > 1 and x.numel() else x.reshape(1, -1)


def _row_blocks(x_PF: Tensor) -> Iterator[slice]:
    rows = max(1, _BLOCK // max(1, x_PF.shape[1]))
    for first in range(0, x_PF.shape[0], rows):
        yield slice(first, first + rows)
