"""Kimi Delta Attention: the op (Kimi K3 report §2.1.1; arXiv 2510.26692 §3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops import backend
from openk3.ops.kda_backward import chunk_backward
from openk3.ops.kda_chunk import Inputs, Kept, chunk_forward
from openk3.ops.kda_plan import make_plan
from openk3.ops.kda_recurrent import kda_step
from openk3.ops.kda_reference import kda_reference
from openk3.ops.kda_tiles import factored_tiles
from openk3.ops.precision import accumulation_dtype, exact
from openk3.ops.segments import Segments

__all__ = ["kda", "kda_chunk", "kda_reference"]


def kda(
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
    """Run the gated delta rule over ragged sequences.

    Per head, with a state S of shape `[K, V]`: `S <- diag(exp(g)) S`, `S <- S + beta k (v - Sᵀk)ᵀ`, `o = scale Sᵀq`.

    Args:
        q, k: `[T, H, K]`, already l2-normalised.
        v: `[T, H, V]`.
        g: `[T, H, K]`, log decay in nats, in (-inf, 0].
        beta: `[T, H]`, how much of the correction is written, in [0, 1].
        segments: N sequences that add up to T tokens; a length may be 0.
        initial_state: `[N, H, K, V]`, or None for zeros.
        scale: of the output; `K ** -0.5` by default.
        lower_bound: a promise that `g >= lower_bound` everywhere (K3's gate: -5). It allows a faster form, and is not checked.

    Returns:
        o `[T, H, V]` in v's dtype, and the state after each sequence, `[N, H, K, V]` in at least fp32.

    Differentiable once in every tensor, through both results. Calls without gradient in which every sequence has one token take the
    recurrent step. Raises ValueError where shapes do not fit together.
    """
    _check(q, k, v, g, beta, segments, initial_state)
    forms: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"reference": kda_reference, "torch": kda_chunk}
    run = backend.pick(forms, q)
    return run(q, k, v, g, beta, segments, initial_state, scale=scale, lower_bound=lower_bound)


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segments: Segments, initial_state: Tensor | None) -> None:
    if q.dim() != 3 or v.dim() != 3 or k.shape != q.shape or g.shape != q.shape or v.shape[:2] != q.shape[:2] or beta.shape != q.shape[:2]:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v), ("g", g), ("beta", beta)))
        raise ValueError(f"kda: q, k, g are [T, H, K], v is [T, H, V], beta is [T, H]; got {shapes}")
    segments.check(q.shape[0])
    state_shape = (segments.count, *q.shape[1:], v.shape[2])
    if initial_state is not None and initial_state.shape != state_shape:
        raise ValueError(f"kda: initial_state is [N, H, K, V] = {list(state_shape)}; got {list(initial_state.shape)}")


def kda_chunk(
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
    """The chunked form in torch, or the recurrent step where each sequence has one token; as `kda`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    tensors = (q, k, v, g, beta, initial_state)
    differentiable = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    if differentiable:
        result: tuple[Tensor, Tensor] = _Chunked.apply(*tensors, segments, scale, factored_tiles(lower_bound))
        return result
    if segments.longest == 1 and segments.total == segments.count:
        return kda_step(q, k, v, g, beta, initial_state, scale=scale)
    x = Inputs(q, k, v, g, beta, initial_state, scale, factored_tiles(lower_bound), accumulation_dtype(q, k, v, g, beta))
    with torch.no_grad(), exact(q):
        o, final, _ = chunk_forward(x, make_plan(segments, q.shape[1], q.device), segments.count, keep=False)
    return o, final


class _Chunked(torch.autograd.Function):
    """Saves the inputs, each token's error E and the state before each chunk: T·H·(K + V) numbers; the rest is made again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None, segments: Segments, scale: float, factored: bool) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(q, k, v, g, beta)
        with exact(q):
            plan = make_plan(segments, q.shape[1], q.device)
            o, final, kept = chunk_forward(Inputs(q, k, v, g, beta, initial_state, scale, factored, dtype), plan, segments.count, keep=True)
        assert kept is not None
        ctx.save_for_backward(q, k, v, g, beta, initial_state, kept.errors, kept.states)
        ctx.plan, ctx.scale, ctx.factored, ctx.dtype = plan, scale, factored, dtype
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, initial_state, errors, states = ctx.saved_tensors
        x = Inputs(q, k, v, g, beta, initial_state, ctx.scale, ctx.factored, ctx.dtype)
        with exact(q):
            grads = chunk_backward(x, ctx.plan, Kept(errors, states), do, dfinal)
        return grads.q, grads.k, grads.v, grads.g, grads.beta, grads.initial_state, None, None, None
