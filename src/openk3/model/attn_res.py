"""Block Attention Residuals: each reader retrieves over depth with one learned query (arXiv 2603.15031; Kimi K3 report §2.2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from openk3.ops.attn_res import attn_res_mix, attn_res_weights


class AttnResMix(nn.Module):
    """Softmax over residual sources by one query; the values are the un-normalised sources.

    `norm_weight [D]` scales the normalised keys, `query [1, D]` scores them. The query starts at zero: uniform averaging.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.norm_weight = nn.Parameter(torch.empty(width))
        self.query = nn.Parameter(torch.empty(1, width))
        self.eps = eps

    def forward(self, blocks: Sequence[Tensor], prefix_TD: Tensor) -> Tensor:
        """Mix completed `blocks` (oldest first, each `[T, D]`) with the running `prefix_TD` to `[T, D]`."""
        return attn_res_mix([*blocks, prefix_TD], self.norm_weight, self.query, self.eps)

    def weights(self, blocks: Sequence[Tensor], prefix_TD: Tensor) -> Tensor:
        """The softmax weights `[T, S]` over the same sources."""
        return attn_res_weights([*blocks, prefix_TD], self.norm_weight, self.query, self.eps)
