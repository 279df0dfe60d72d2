"""KDA as the formula has it: one token after another (Kimi K3 report §2.1.1; arXiv 2510.26692 §3)."""

from __future__ import annotations

import torch
from torch import Tensor

from openk3.ops.segments import Segments


def kda_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segments: Segments,
    initial_state: Tensor | None = None,
    *,
    scale: float | None = None,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence, token by token; arguments and results as `openk3.ops.kda.kda`.

    Per head, with the state S of shape `[K, V]`: `S <- diag(exp(g)) S`, then `S <- S + beta k (v - Sᵀk)ᵀ`, then `o = scale Sᵀ q`.
    The decay comes first, the delta term reads the decayed state, the output reads the updated one.
    """
    del lower_bound  # a promise about g that only the chunked form has a use for
    accumulate = torch.promote_types(v.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v_, g, beta = (x.to(accumulate) for x in (q, k, v, g, beta))
    if initial_state is None:
        initial_state = v_.new_zeros(segments.count, q.shape[1], q.shape[2], v.shape[2])
    outputs, finals = [], []
    for start, length, S in zip(segments.starts, segments.lengths, initial_state.to(accumulate), strict=True):
        for t in range(start, start + length):
            S = S * g[t].exp()[:, :, None]
            delta = v_[t] - torch.einsum("hkv,hk->hv", S, k[t])
            S = S + torch.einsum("h,hk,hv->hkv", beta[t], k[t], delta)
            outputs.append(torch.einsum("hkv,hk->hv", S, q[t]) * scale)
        finals.append(S)
    o = torch.stack(outputs) if outputs else v_[:0]
    final_state = torch.stack(finals) if finals else initial_state.to(accumulate)
    return o.to(v.dtype), final_state
