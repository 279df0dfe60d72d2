"""KDA's decay gate, its l2 normalisation and its gated output norm (Kimi K3 report §2.1.1, eq. 2, 5 and 6)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def kda_gate_reference(f: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """`kda_gate` as the formula has it, with autograd's gradient."""
    accumulate = torch.promote_types(f.dtype, torch.float32)
    rate = A_log.to(accumulate).exp()[:, None]
    z = f.to(accumulate) + dt_bias.to(accumulate).view(f.shape[1:])
    if lower_bound is None:
        return -rate * F.softplus(z)
    return lower_bound * torch.sigmoid(rate * z)


def l2norm_reference(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`l2norm` as the formula has it."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def gated_rms_norm_reference(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """`gated_rms_norm` as the formula has it."""
    accumulate = torch.promote_types(torch.promote_types(x.dtype, gate.dtype), torch.float32)
    wide = x.to(accumulate)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.to(accumulate) * torch.sigmoid(gate.to(accumulate))).to(gate.dtype)


kda_gate = kda_gate_reference
l2norm = l2norm_reference
gated_rms_norm = gated_rms_norm_reference
