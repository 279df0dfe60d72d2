"""RMSNorm: statistics in fp32, cast to the model's dtype, then the weight. Letters: T rows, D width."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import pick
from openk3.ops.precision import accumulation_dtype

# Elements that one pass handles, so that a block is still in the cache when the next pass over it comes.
_BLOCK = 1 << 18


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x · rsqrt(mean(x²) + eps)` over the last axis of `x [..., D]`, times `weight [D]`, in `x.dtype`.

    The statistics are in fp32; the normalised value is cast to `x.dtype` before the weight. Only x and one number a row are saved.
    Raises ValueError when `weight` is not `[D]`.
    """
    if weight.shape != x.shape[-1:]:
        raise ValueError(f"the weight is {tuple(weight.shape)}, but the rows of {tuple(x.shape)} need [{x.shape[-1]}]")
    return pick({"reference": rms_norm_reference, "torch": _RMSNorm.apply}, x)(x, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm as the formula has it."""
    wide = x.to(accumulation_dtype(x))
    normal = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (normal * weight).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        acc = accumulation_dtype(x)
        x_TD = x.reshape(-1, x.shape[-1])
        out_TD = x_TD.new_empty(x_TD.shape)
        rstd_T = x_TD.new_empty(x_TD.shape[0], dtype=acc)
        for rows in _row_blocks(x_TD):
            wide = x_TD[rows].to(acc)
            rstd = torch.rsqrt(torch.linalg.vector_norm(wide, dim=-1).square_().div_(wide.shape[1]).add_(eps), out=rstd_T[rows])
            if x.dtype == acc:
                torch.mul(wide, rstd[:, None], out=out_TD[rows]).mul_(weight)
            else:
                out_TD[rows] = (wide * rstd[:, None]).to(x.dtype) * weight
        ctx.save_for_backward(x, weight, rstd_T)
        return out_TD.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd_T = ctx.saved_tensors
        acc, width = rstd_T.dtype, x.shape[-1]
        x_TD, grad_TD = x.reshape(-1, width), grad.reshape(-1, width)
        dx_TD = x_TD.new_empty(x_TD.shape)
        weight_D = weight.to(acc)
        dweight_D = torch.zeros_like(weight_D)
        for rows in _row_blocks(x_TD):
            wide, dy, rstd = x_TD[rows].to(acc), grad_TD[rows].to(acc), rstd_T[rows]
            product = wide * dy
            # With n = x·rstd: dx = rstd·(w dy − n·mean(w dy n)).
            along = torch.mv(product, weight_D).mul_(rstd.pow(3)).div_(-width)
            dweight_D += torch.mv(product.t(), rstd)
            dx = dx_TD[rows] if x.dtype == acc else product
            torch.mul(dy, weight_D, out=dx).mul_(rstd[:, None]).addcmul_(wide, along[:, None])
            if x.dtype != acc:
                dx_TD[rows] = dx
        return dx_TD.view(x.shape), dweight_D.to(weight.dtype), None


def _row_blocks(x_TD: Tensor) -> Iterator[slice]:
    rows = max(1, _BLOCK // max(1, x_TD.shape[1]))
    for first in range(0, x_TD.shape[0], rows):
        yield slice(first, first + rows)
