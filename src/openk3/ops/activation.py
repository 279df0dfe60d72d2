"""Gated activations: SiTU-GLU, bounded in both factors, and SwiGLU (Kimi K3 report §2.3.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.ops.precision import accumulation_dtype


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
    """SiTU-GLU of `gate` and `up` of one shape, in `gate.dtype`. `linear_beta=None` leaves `up` unbounded."""
    return situ_glu_reference(gate, up, beta, linear_beta)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU of `gate` and `up` of one shape, in `gate.dtype`."""
    return swiglu_reference(gate, up)


@dataclass(frozen=True)
class GluActivation:
    """A gated activation by name: "situ" (with its two bounds) or "silu" (the bounds are not used)."""

    name: str
    beta: float = 1.0
    linear_beta: float | None = None

    def __post_init__(self) -> None:
        if self.name not in ("situ", "silu"):
            raise ValueError(f"activation {self.name!r} is not known; it is 'situ' or 'silu'")

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """The activation of `gate` and `up` of one shape, in `gate.dtype`."""
        return situ_glu(gate, up, self.beta, self.linear_beta) if self.name == "situ" else swiglu(gate, up)
