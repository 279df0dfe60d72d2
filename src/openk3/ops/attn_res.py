"""Mixing residual sources by one learned query (arXiv 2603.15031; Kimi K3 report §2.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openk3.ops.precision import accumulation_dtype


def attn_res_weights_reference(sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """Softmax over the sources of `query · RMSNorm(source)`, `[T, S]` in fp32."""
    acc = accumulation_dtype(*sources)
    v_STD = torch.stack(list(sources)).to(acc)
    k_STD = v_STD * torch.rsqrt(v_STD.square().mean(-1, keepdim=True) + eps)
    score_ST = (k_STD * (norm_weight.to(acc) * proj_weight.to(acc).view(-1))).sum(-1)
    return torch.softmax(score_ST.t(), dim=-1)


def attn_res_mix_reference(sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """`Σ p_j V_j` with p from `attn_res_weights_reference` and V the un-normalised sources; fp32, one cast at the end."""
    p_TS = attn_res_weights_reference(sources, norm_weight, proj_weight, eps)
    v_STD = torch.stack(list(sources)).to(p_TS.dtype)
    return torch.einsum("ts,std->td", p_TS, v_STD).to(sources[-1].dtype)


def attn_res_weights(sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """The softmax weights `[T, S]` (at least fp32) over the `sources`; see `attn_res_mix`."""
    return attn_res_weights_reference(sources, norm_weight, proj_weight, eps)


def attn_res_mix(sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """The weighted sum `[T, D]` of `sources`, each `[T, D]`: completed blocks, oldest first, then the running prefix.

    `norm_weight [D]` and `proj_weight [1, D]` make the keys and the query.
    """
    return attn_res_mix_reference(sources, norm_weight, proj_weight, eps)
