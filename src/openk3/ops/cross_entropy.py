"""Cross-entropy of a linear head, with logits only ever for a block of rows.

Letters: T tokens, D hidden, V vocabulary, R rows of a block, O a single column.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import pick
from openk3.ops.precision import accumulation_dtype, exact

# Logits of a block: 64 MiB in fp32 at most, and no more rows than the matrix library needs to run at full rate.
_MOST_LOGITS = 1 << 24
_ENOUGH_ROWS = 512
_SMALL_LOGITS = 1 << 22


class LossTerms(NamedTuple):
    """A sum of losses and what it consists of."""

    total: Tensor
    """The sum of each token's loss times its weight: a scalar, at least fp32. Divide by the tokens yourself."""
    per_token: Tensor
    """`[T]`: each token's loss without its weight, 0 where the target is ignored; detached."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor | None = None, *, rows: int | None = None
) -> LossTerms:
    """Cross-entropy of the logits `hidden [T, D] · weightᵀ [V, D]` against `targets [T]` int64; a negative target is ignored.

    `token_weights [T]` scale each token's share of the total and get no gradient. Logits are products in `hidden.dtype` and normalised in
    fp32, `rows` tokens at a time (None: as many as give a good product). Gradients of hidden and weight are made in the same pass,
    when someone needs them, so no logits are saved.

    Raises ValueError for a target of V or more, or shapes that do not fit.
    """
    _check(hidden, weight, targets, token_weights)
    if rows is not None and rows < 1:
        raise ValueError(f"rows is {rows}: a block has at least one row")
    with exact(hidden):
        forms = {"reference": linear_cross_entropy_reference, "torch": _blockwise}
        return pick(forms, hidden)(hidden, weight, targets, token_weights, rows=rows)


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor | None = None, *, rows: int | None = None
) -> LossTerms:
    """All the logits at once, whatever `rows` asks for."""
    acc = accumulation_dtype(hidden, weight)
    logits_TV = (hidden @ weight.to(hidden.dtype).t()).to(acc)
    per_token = F.cross_entropy(logits_TV, targets.clamp_min(-1), ignore_index=-1, reduction="none")
    weighted = per_token if token_weights is None else per_token * token_weights.to(acc)
    return LossTerms(weighted.sum(), per_token.detach())


def _blockwise(hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor | None, *, rows: int | None) -> LossTerms:
    return LossTerms(*_LinearCrossEntropy.apply(hidden, weight, targets, token_weights, rows, torch.is_grad_enabled()))


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor | None) -> None:
    tokens = hidden.shape[0]
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != (tokens,):
        raise ValueError(f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} do not fit")
    if token_weights is not None and token_weights.shape != (tokens,):
        raise ValueError(f"token weights are {tuple(token_weights.shape)} for {tokens} tokens")
    if tokens and int(targets.max()) >= weight.shape[0]:
        worst = int(targets.argmax())
        raise ValueError(f"target {int(targets[worst])} at position {worst} is outside the vocabulary of {weight.shape[0]}")


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor | None, rows: int | None, grad: bool
    ) -> tuple[Tensor, Tensor]:
        acc = accumulation_dtype(hidden, weight)
        head_VD = weight.to(hidden.dtype)
        kept_T = (targets >= 0).nonzero().flatten()
        whole = kept_T.numel() == targets.numel()
        hidden_TD, targets_T = (hidden, targets) if whole else (hidden[kept_T], targets[kept_T])
        weights_T = None if token_weights is None else token_weights[kept_T].to(acc)
        per_token = hidden.new_zeros(targets.shape, dtype=acc)
        losses_T = hidden.new_empty(kept_T.shape, dtype=acc)
        dhidden_TD = torch.empty_like(hidden_TD) if grad and ctx.needs_input_grad[0] else None
        dweight_VD = torch.zeros_like(weight, dtype=acc) if grad and ctx.needs_input_grad[1] else None
        step = rows or max(1, _SMALL_LOGITS // head_VD.shape[0], min(_ENOUGH_ROWS, _MOST_LOGITS // head_VD.shape[0]))
        buffer_RV = hidden.new_empty(min(step, kept_T.numel()), head_VD.shape[0], dtype=acc)
        for first in range(0, kept_T.numel(), step):
            block = slice(first, first + step)
            h_RD, target_RO = hidden_TD[block], targets_T[block, None]
            logits_RV = _product(h_RD, head_VD.t(), buffer_RV[: h_RD.shape[0]])
            chosen_RO = logits_RV.gather(1, target_RO)
            most_RO = logits_RV.amax(1, keepdim=True)
            exp_RV = logits_RV.sub_(most_RO).exp_()
            sum_RO = exp_RV.sum(1, keepdim=True)
            losses_T[block] = (sum_RO.log() + most_RO - chosen_RO).flatten()
            if dhidden_TD is None and dweight_VD is None:
                continue
            # softmax − onehot = (exp − sum·onehot) / sum; the division is left to the narrow side of the products.
            exp_RV.scatter_add_(1, target_RO, -sum_RO)
            share_RO = sum_RO.reciprocal() if weights_T is None else weights_T[block, None] / sum_RO
            slope_RV = exp_RV.to(hidden.dtype)
            if dhidden_TD is not None:
                dhidden_TD[block] = (slope_RV @ head_VD) * share_RO
            if dweight_VD is not None:
                scaled_RD = (h_RD * share_RO).to(hidden.dtype)
                if scaled_RD.dtype == acc:
                    dweight_VD.addmm_(slope_RV.t(), scaled_RD)
                else:
                    dweight_VD += slope_RV.t() @ scaled_RD
        per_token[kept_T] = losses_T
        total = losses_T.sum() if weights_T is None else torch.dot(losses_T, weights_T)
        ctx.kept, ctx.shape = None if whole else kept_T, hidden.shape
        ctx.save_for_backward(dhidden_TD, None if dweight_VD is None else dweight_VD.to(weight.dtype))
        ctx.mark_non_differentiable(per_token)
        return total, per_token

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        dhidden, dweight = ctx.saved_tensors
        if dhidden is not None:
            dhidden = dhidden * grad_total.to(dhidden.dtype)
            if ctx.kept is not None:
                dhidden = dhidden.new_zeros(ctx.shape).index_copy_(0, ctx.kept, dhidden)
        if dweight is not None:
            dweight = dweight * grad_total.to(dweight.dtype)
        return dhidden, dweight, None, None, None, None


def _product(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    return torch.mm(a, b, out=out) if a.dtype == out.dtype else out.copy_(a @ b)
