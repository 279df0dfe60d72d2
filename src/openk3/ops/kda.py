"""Kimi Delta Attention: the op (Kimi K3 report §2.1.1; arXiv 2510.26692 §3)."""

from __future__ import annotations

from torch import Tensor

from openk3.ops.kda_reference import kda_reference
from openk3.ops.segments import Segments

__all__ = ["kda", "kda_reference"]


def kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Segments,
    initial_state: Tensor | None = None,
    *,
    scale: float | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule over ragged sequences; `(o[T, H, V], final_state[N, H, K, V])`."""
    return kda_reference(q, k, v, g, beta, segments, initial_state, scale=scale, lower_bound=lower_bound)
