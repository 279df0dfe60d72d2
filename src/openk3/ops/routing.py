"""Which experts a token goes to, and with which weights (Kimi K3 report §2.3.3). Letters: T tokens, D hidden, E experts, k chosen."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import pick
from openk3.ops.precision import accumulation_dtype, exact


class Selection(NamedTuple):
    """What the router decided for each token."""

    ids: Tensor
    """int64 `[T, k]`, ascending in each row."""
    weights: Tensor
    """`[T, k]`, at least fp32, without the bias; gradients reach x and the router's weight through these."""
    scores: Tensor
    """`[T, E]`, at least fp32, without the bias; detached."""
    cutoff: Tensor | None
    """`[T]`, the (k+1)-th best biased score, −inf when k == E; None when the ids were given."""


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
    """Score E experts for each row of `x [T, D]` with `weight [E, D]` and choose `top_k` of them.

    `bias [E]` is added for the choice only. All of it is done in fp32 (float64 for float64 inputs), whatever the dtype of x. Of equal
    biased scores the lower id wins. With `groups` > `topk_groups` ≥ 1 only experts of the best groups can be chosen; a group is worth the
    sum of its two best biased scores, the lower group wins ties. Weights are the scores of the chosen, divided by their sum + 1e-20 when
    `renormalize` and k > 1, times `scale`. Given `ids [T, k]` nothing is chosen: their weights follow from the current scores (replay).

    Raises ValueError for NaN scores, an unknown activation, or numbers that do not fit.
    """
    _check(x, weight, bias, top_k, activation, groups, topk_groups, ids)
    with exact(x):
        logits_TE = _Logits.apply(x, weight)
    scores_TE = torch.sigmoid(logits_TE) if activation == "sigmoid" else torch.softmax(logits_TE, -1)
    plain_TE = scores_TE.detach()
    _refuse_nan(plain_TE, bias)
    cutoff_T = None
    if ids is None:
        biased_TE = plain_TE if bias is None else plain_TE + bias.to(plain_TE.dtype)
        if groups > max(1, topk_groups):
            biased_TE = _only_best_groups(biased_TE, groups, topk_groups)
        ids, cutoff_T = pick({"reference": top_k_reference, "torch": _top_k}, biased_TE)(biased_TE, top_k)
    weights_Tk = scores_TE.gather(1, ids)
    if renormalize and ids.shape[1] > 1:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + 1e-20)
    return Selection(ids, weights_Tk if scale == 1.0 else weights_Tk * scale, plain_TE, cutoff_T)


def top_k_reference(biased: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """The ids `[T, k]`, ascending, of the best of `biased [T, E]`, and the best score not chosen: by a stable sort of each whole row."""
    best = biased.sort(dim=-1, descending=True, stable=True)
    cutoff = best.values[:, top_k] if top_k < biased.shape[1] else biased.new_full(biased.shape[:1], -torch.inf)
    return best.indices[:, :top_k].sort(-1).values, cutoff


def _top_k(biased_TE: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    if top_k == biased_TE.shape[1]:
        return top_k_reference(biased_TE, top_k)
    best = biased_TE.topk(top_k + 1, dim=-1)
    ids_Tk, cutoff_T = best.indices[:, :top_k].sort(-1).values, best.values[:, top_k]
    # topk's order among equals is unspecified, which matters only where the last one in equals the first one out.
    tied_T = best.values[:, top_k - 1] == cutoff_T
    if bool(tied_T.any()):
        rows = tied_T.nonzero().flatten()
        ids_Tk[rows] = top_k_reference(biased_TE[rows], top_k)[0]
    return ids_Tk, cutoff_T


def _only_best_groups(biased_TE: Tensor, groups: int, topk_groups: int) -> Tensor:
    grouped_TGM = biased_TE.unflatten(1, (groups, biased_TE.shape[1] // groups))
    worth_TG = grouped_TGM.topk(min(2, grouped_TGM.shape[-1]), -1).values.sum(-1)
    kept = worth_TG.sort(dim=-1, descending=True, stable=True).indices[:, :topk_groups]
    dropped_TG = torch.ones_like(worth_TG, dtype=torch.bool).scatter_(1, kept, False)
    return grouped_TGM.masked_fill(dropped_TG[..., None], -torch.inf).flatten(1)


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int, activation: str, groups: int, topk_groups: int, ids: Tensor | None
) -> None:
    experts = weight.shape[0]
    if activation not in ("sigmoid", "softmax"):
        raise ValueError(f"router activation {activation!r} is not known; it is 'sigmoid' or 'softmax'")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or (bias is not None and bias.shape != (experts,)):
        shapes = [None if tensor is None else tuple(tensor.shape) for tensor in (x, weight, bias)]
        raise ValueError(f"x {shapes[0]}, weight {shapes[1]} and bias {shapes[2]} do not fit")
    if ids is not None:
        if ids.dim() != 2 or ids.shape[0] != x.shape[0]:
            raise ValueError(f"ids to replay are {tuple(ids.shape)} for {x.shape[0]} tokens")
        return
    if not 1 <= top_k <= experts:
        raise ValueError(f"cannot choose {top_k} of {experts} experts")
    if groups > max(1, topk_groups):
        if topk_groups < 1 or experts % groups:
            raise ValueError(f"{experts} experts do not make {groups} groups of which {topk_groups} are kept")
        if experts // groups * topk_groups < top_k:
            raise ValueError(f"cannot choose {top_k} experts from {topk_groups} groups of {experts // groups}")


def _refuse_nan(scores_TE: Tensor, bias: Tensor | None) -> None:
    if bias is not None and bool(torch.isnan(bias).any()):
        raise ValueError(f"the router's bias is NaN for expert {int(torch.isnan(bias).nonzero()[0])}")
    # The scores lie in 0…1, so their sum is NaN exactly when one of them is.
    if bool(torch.isnan(scores_TE.sum())):
        token, expert = torch.isnan(scores_TE).nonzero()[0].tolist()
        raise ValueError(f"the router's score is NaN for token {token} and expert {expert}: its input or its weight is not finite")


class _Logits(torch.autograd.Function):
    """`x weightᵀ` in fp32, with x saved as it came and not as its wider copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        acc = accumulation_dtype(x, weight)
        ctx.save_for_backward(x, weight)
        return x.to(acc) @ weight.to(acc).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        with exact(grad):
            dx = (grad @ weight.to(grad.dtype)).to(x.dtype) if ctx.needs_input_grad[0] else None
            dweight = (grad.t() @ x.to(grad.dtype)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return dx, dweight
