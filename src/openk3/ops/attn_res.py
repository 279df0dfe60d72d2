"""Mixing residual sources by one learned query (arXiv 2603.15031; Kimi K3 report §2.2). Letters: T tokens, D hidden, S residual sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import pick
from openk3.ops.precision import accumulation_dtype, exact

# Elements of each source that one pass handles: fp32 temporaries stay this small, whatever T, and in the cache between passes.
_BLOCK = 1 << 18


def attn_res_mix(sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """`Σ_j p_j V_j` with `p = softmax_j(Σ_c RMSNorm(V_j)_c · norm_weight_c · proj_weight_c)`; the V are not normalised.

    `sources` are S tensors `[T, D]`: completed blocks, oldest first, then the running prefix. `norm_weight [D]`, `proj_weight [1, D]`.
    The result `[T, D]` is a new tensor in the prefix's dtype, computed in fp32. Saved for the backward: the sources and `[S, T]` numbers.

    Raises ValueError when there is no source or the shapes differ.
    """
    _check(sources, norm_weight, proj_weight)
    with exact(sources[-1]):
        return pick({"reference": attn_res_mix_reference, "torch": _mix}, sources[-1])(sources, norm_weight, proj_weight, eps)


def attn_res_weights(sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """The softmax weights `[T, S]`, at least fp32, that `attn_res_mix` gives its `sources`."""
    _check(sources, norm_weight, proj_weight)
    return attn_res_weights_reference(sources, norm_weight, proj_weight, eps)


def attn_res_weights_reference(sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """The softmax weights `[T, S]` as the formula has them."""
    acc = accumulation_dtype(*sources)
    query_D = norm_weight.to(acc) * proj_weight.to(acc).view(-1)
    scores = []
    for source in sources:
        wide_TD = source.to(acc)
        key_TD = wide_TD * torch.rsqrt(wide_TD.square().mean(-1, keepdim=True) + eps)
        scores.append((key_TD * query_D).sum(-1))
    return torch.softmax(torch.stack(scores, dim=-1), dim=-1)


def attn_res_mix_reference(sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    """The mix as the formula has it."""
    p_TS = attn_res_weights_reference(sources, norm_weight, proj_weight, eps)
    v_TSD = torch.stack(list(sources), dim=1).to(p_TS.dtype)
    return (p_TS[..., None] * v_TSD).sum(1).to(sources[-1].dtype)


def _check(sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor) -> None:
    if not sources:
        raise ValueError("there is no residual source to mix")
    shape = sources[-1].shape
    if len(shape) != 2 or any(source.shape != shape for source in sources):
        raise ValueError(f"residual sources differ in shape: {[tuple(source.shape) for source in sources]}; each is [T, D]")
    if norm_weight.shape != shape[1:] or proj_weight.shape != (1, shape[1]):
        raise ValueError(f"norm {tuple(norm_weight.shape)} and query {tuple(proj_weight.shape)} for sources of width {shape[1]}")


def _mix(sources: Sequence[Tensor], norm_weight: Tensor, proj_weight: Tensor, eps: float) -> Tensor:
    return _Mix.apply(norm_weight, proj_weight, eps, *sources)


class _Mix(torch.autograd.Function):
    """One node over all the sources, so that no fp32 stack of them outlives a block of rows."""

    @staticmethod
    def forward(ctx: Any, norm_weight: Tensor, proj_weight: Tensor, eps: float, *sources: Tensor) -> Tensor:
        acc = accumulation_dtype(*sources)
        query_D = norm_weight.to(acc) * proj_weight.to(acc).view(-1)
        tokens, width = sources[-1].shape
        out_TD = sources[-1].new_empty(tokens, width)
        # Axis 0: scores, then probabilities; reciprocal root mean squares; scores.
        p_ST, rstd_ST, score_ST = sources[-1].new_empty(3, len(sources), tokens, dtype=acc)
        for rows in _row_blocks(tokens, width):
            wide = [source[rows].to(acc) for source in sources]
            rstd, score = rstd_ST[:, rows], score_ST[:, rows]
            for j, v in enumerate(wide):
                torch.linalg.vector_norm(v, dim=-1, out=rstd[j])
                torch.mv(v, query_D, out=score[j])
            rstd.square_().div_(width).add_(eps).rsqrt_()
            p = p_ST[:, rows] = torch.softmax(score.mul_(rstd), 0)
            mixed = out_TD[rows] if out_TD.dtype == acc else torch.empty_like(wide[0])
            torch.mul(wide[0], p[0][:, None], out=mixed)
            for j, v in enumerate(wide[1:], start=1):
                mixed.addcmul_(v, p[j][:, None])
            if out_TD.dtype != acc:
                out_TD[rows] = mixed
        ctx.save_for_backward(norm_weight, proj_weight, p_ST, rstd_ST, score_ST, *sources)
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        norm_weight, proj_weight, p_ST, rstd_ST, score_ST, *sources = ctx.saved_tensors
        acc, width = p_ST.dtype, grad.shape[1]
        wanted = ctx.needs_input_grad[3:]
        query_D = norm_weight.to(acc) * proj_weight.to(acc).view(-1)
        dquery_D = torch.zeros_like(query_D)
        dsources = [s.new_empty(s.shape) if want else None for s, want in zip(sources, wanted, strict=True)]
        with exact(grad):
            for rows in _row_blocks(grad.shape[0], width):
                g, p, rstd, score = grad[rows].to(acc), p_ST[:, rows], rstd_ST[:, rows], score_ST[:, rows]
                wide = [source[rows].to(acc) for source in sources]
                product, dp = torch.empty_like(g), torch.empty_like(p)
                for j, v in enumerate(wide):
                    torch.sum(torch.mul(v, g, out=product), -1, out=dp[j])
                dscore = p * (dp - (p * dp).sum(0))
                along_query = dscore * rstd
                along_source = along_query * score * rstd / -width
                for j, (v, dsource) in enumerate(zip(wide, dsources, strict=True)):
                    dquery_D.addmv_(v.t(), along_query[j])
                    if dsource is not None:
                        # score = rstd · (v · query), so its gradient lies along the query and, through rstd, along v.
                        out = dsource[rows] if dsource.dtype == acc else product
                        torch.mul(g, p[j][:, None], out=out).addr_(along_query[j], query_D).addcmul_(v, along_source[j][:, None])
                        if dsource.dtype != acc:
                            dsource[rows] = out
        dnorm = (dquery_D * proj_weight.to(acc).view(-1)).to(norm_weight.dtype)
        dproj = (dquery_D * norm_weight.to(acc)).to(proj_weight.dtype).view_as(proj_weight)
        return dnorm, dproj, None, *dsources


def _row_blocks(tokens: int, width: int) -> Iterator[slice]:
    rows = max(1, _BLOCK // max(1, width))
    for first in range(0, tokens, rows):
        yield slice(first, first + rows)
