"""KDA by flash-linear-attention's Triton kernels (fla-core 0.6; github.com/fla-org/flash-linear-attention), for CUDA.

Untested on a GPU: only the call that it makes is tested, against a stand-in.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from openk3.ops.segments import Segments

# What the kernels accept.
_WIDEST_KEY = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _installed() -> bool:
    return find_spec("fla") is not None


def fla_applies(q: Tensor) -> bool:
    """Whether the kernels can take tensors like `q` `[T, H, K]`, and are installed."""
    return q.is_cuda and q.dtype in _DTYPES and 0 < q.shape[2] <= _WIDEST_KEY and q.shape[0] > 0 and _installed()


def kda_fla(
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
    """Chunks by `chunk_kda`; its decode kernel `fused_recurrent_kda` where each sequence has one token and no gradient is asked.

    Arguments and results as `openk3.ops.kda.kda`; the state is fp32. Sequences without a token do not reach the kernels: their state is
    handed through. The kernels' own fast path for bounded gates (`safe_gate`) is not asked for, since it has been reported to make outputs
    depend on later tokens' gates, so `lower_bound` is of no use here.
    """
    del lower_bound
    kernels = import_module("fla.ops.kda")
    used = [n for n, length in enumerate(segments.lengths) if length]
    everyone = len(used) == segments.count
    rows = None if everyone else torch.tensor(used, device=q.device)
    state = None if initial_state is None else initial_state.float()
    offsets = Segments(tuple(segments.lengths[n] for n in used)).offsets
    tensors = (q, k, v, g, beta, initial_state)
    decode = segments.longest == 1 and not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors))
    run = kernels.fused_recurrent_kda if decode else kernels.chunk_kda
    o, final = run(
        q=q.contiguous()[None],
        k=k.to(q.dtype).contiguous()[None],
        v=v.to(q.dtype).contiguous()[None],
        g=g.float().contiguous()[None],
        beta=beta.float().contiguous()[None],
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        initial_state=state if state is None or rows is None else state.index_select(0, rows),
        output_final_state=True,
        cu_seqlens=offsets.to(q.device),
    )
    if rows is not None:
        resting = final.new_zeros((segments.count, *final.shape[1:])) if state is None else state
        final = resting.index_copy(0, rows, final.float())
    return o[0].to(v.dtype), final.float()
