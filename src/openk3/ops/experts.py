"""Routed experts: E gated MLPs of which each token visits k (Kimi K3 report §2.3). Letters: T tokens, k chosen, E experts, L latent, F width."""

from __future__ import annotations

import torch
from torch import Tensor

from openk3.ops.activation import GluActivation
from openk3.ops.precision import accumulation_dtype, exact


def expert_mlp_reference(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, activation: GluActivation) -> Tensor:
    """`Σ_j weights_j · w2[e_j] act(w13[e_j] x)` expert by expert."""
    acc = accumulation_dtype(x, weights)
    out = torch.zeros(x.shape, dtype=acc, device=x.device)
    with exact(x):
        for expert in range(w13.shape[0]):
            token, slot = torch.where(ids == expert)
            gate, up = (x[token] @ w13[expert].t()).chunk(2, dim=-1)
            y = activation(gate, up) @ w2[expert].t()
            out = out.index_add(0, token, y.to(acc) * weights[token, slot].to(acc)[:, None])
    return out.to(x.dtype)


def expert_mlp(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, activation: GluActivation) -> Tensor:
    """The weighted sum `[T, L]` of the chosen experts' outputs.

    `x [T, L]`, `ids [T, k]`, `weights [T, k]`, `w13 [E, 2F, L]` (gate rows, then up rows), `w2 [E, L, F]`.
    """
    return expert_mlp_reference(x, ids, weights, w13, w2, activation)
