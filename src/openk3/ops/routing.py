"""Which experts a token goes to and with which weight (Kimi K3 report §2.3.3). Letters: T tokens, D hidden, E experts, k chosen."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from openk3.ops.precision import accumulation_dtype, exact


class Selection(NamedTuple):
    """What the router decided for each token."""

    ids: Tensor
    """int64 `[T, k]`, ascending in each row."""
    weights: Tensor
    """`[T, k]`, at least fp32, unbiased; gradients flow through these."""
    scores: Tensor
    """`[T, E]`, at least fp32, unbiased, detached."""
    cutoff: Tensor | None
    """`[T]`, the (k+1)-th best biased score (−inf when k == E); None when the ids were given."""


def route(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    activation: str = "sigmoid",
    renormalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    topk_groups: int = 1,
    ids: Tensor | None = None,
) -> Selection:
    """Choose `top_k` of E experts for each row of `x [T, D]` by `weight [E, D]` and the selection `bias [E]`."""
    acc = accumulation_dtype(x, weight)
    with exact(x):
        logits = x.to(acc) @ weight.to(acc).t()
    scores = torch.sigmoid(logits) if activation == "sigmoid" else torch.softmax(logits, -1)
    cutoff = None
    if ids is None:
        biased = scores.detach() if bias is None else scores.detach() + bias.to(acc)
        if groups > 1 and groups > topk_groups:
            grouped = biased.view(biased.shape[0], groups, -1)
            group_score = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
            kept = group_score.sort(dim=-1, descending=True, stable=True).indices[:, :topk_groups]
            allowed = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, kept, True)
            biased = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
        best = biased.sort(dim=-1, descending=True, stable=True)
        cutoff = best.values[:, top_k] if top_k < biased.shape[1] else biased.new_full((biased.shape[0],), -torch.inf)
        ids = best.indices[:, :top_k].sort(-1).values
    weights = scores.gather(1, ids)
    if renormalize and top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Selection(ids, weights * scale, scores.detach(), cutoff)
