"""RMSNorm: statistics in fp32, cast to the model's dtype, then the weight."""

from __future__ import annotations

import torch
from torch import Tensor

from openk3.ops.precision import accumulation_dtype


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x·rsqrt(mean(x²) + eps)` over the last axis in fp32, cast to `x.dtype`, then times `weight`."""
    xf = x.to(accumulation_dtype(x))
    normal = (xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (normal * weight).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of `x [..., D]` over its last axis, times `weight [D]`, in `x.dtype`."""
    return rms_norm_reference(x, weight, eps)
