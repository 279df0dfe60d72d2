"""One token a sequence: KDA's step of decode, for N sequences at once."""

from __future__ import annotations

import torch
from torch import Tensor

from openk3.ops.precision import accumulation_dtype, exact


def kda_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None, *, scale: float) -> tuple[Tensor, Tensor]:
    """Sequence n gets token n: q, k, g `[N, H, K]`, v `[N, H, V]`, beta `[N, H]`, state `[N, H, K, V]` or None for zeros.

    Returns o `[N, H, V]` in v's dtype and the new state; not to be differentiated. Both reads of the decayed state S̄, by k and by q, are
    one product: after the update, `Sᵀq = S̄ᵀq + (k·q) beta (v - S̄ᵀk)`.
    """
    dtype = accumulation_dtype(q, k, v, g, beta)
    N, H, K = q.shape
    V = v.shape[-1]
    q, k, wide_v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    with exact(q):
        if state is None:
            write = wide_v * beta[:, :, None]
            o = write * (q * k).sum(-1, keepdim=True)
            return (o * scale).to(v.dtype), k[:, :, :, None] * write[:, :, None, :]
        state = state.to(dtype)
        decay = g.exp()
        rows = torch.stack([k, q], dim=2) * decay[:, :, None]
        seen = torch.bmm(rows.view(N * H, 2, K), state.reshape(N * H, K, V)).view(N, H, 2, V)
        write = (wide_v - seen[:, :, 0]) * beta[:, :, None]
        o = torch.addcmul(seen[:, :, 1], write, (q * k).sum(-1, keepdim=True)).mul_(scale)
        new_state = state * decay[:, :, :, None]
        new_state.addcmul_(k[:, :, :, None], write[:, :, None, :])
    return o.to(v.dtype), new_state
