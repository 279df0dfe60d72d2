"""RMSNorm as the release has it: statistics in fp32, cast to the model's dtype, then the weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openk3.ops.norm import rms_norm


class RMSNorm(nn.Module):
    """`x · rsqrt(mean(x²) + eps)` over the last axis, times `weight [width]`."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`x [..., width]` to the same shape and dtype."""
        return rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.numel()}, eps={self.eps}"
