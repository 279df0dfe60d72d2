"""Cross-entropy of a linear head, with logits only ever for a block of rows. Letters: T tokens, D hidden, V vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from openk3.ops.precision import accumulation_dtype, exact


class LossTerms(NamedTuple):
    """`total`: the weighted sum of losses, a scalar. `per_token [T]`: each token's own loss, unweighted, 0 where ignored, detached."""

    total: Tensor
    per_token: Tensor


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor | None = None, *, rows: int | None = None
) -> LossTerms:
    """Cross-entropy of `hidden [T, D] @ weightᵀ [V, D]` against `targets [T]`; negative targets are ignored."""
    acc = accumulation_dtype(hidden)
    with exact(hidden):
        logits = (hidden @ weight.to(hidden.dtype).t()).to(acc)
    kept = targets >= 0
    per_token = F.cross_entropy(logits, targets.clamp_min(0), reduction="none") * kept
    weighted = per_token if token_weights is None else per_token * token_weights.to(acc)
    return LossTerms(weighted.sum(), per_token.detach())
