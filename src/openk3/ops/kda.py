"""Kimi Delta Attention: the op (Kimi K3 report §2.1.1; arXiv 2510.26692 §3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops import backend
from openk3.ops.kda_backward import chunk_backward
from openk3.ops.kda_chunk import Inputs, Kept, chunk_forward
from openk3.ops.kda_fla import fla_applies, kda_fla
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

    Differentiable once in every tensor, through both results. Where no gradient is asked, sequences of one token take the recurrent step.
    Raises ValueError where shapes do not fit together.

    Forms: `reference`, token by token; `torch`, chunked; `fla`, on CUDA where flash-linear-attention is installed (untested on a GPU).
    """
    _check(q, k, v, g, beta, segments, initial_state)
    forms: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"reference": kda_reference, "torch": kda_chunk}
    if fla_applies(q):
        forms["fla"] = kda_fla
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
    """The chunked form in torch, and the recurrent step for sequences of one token; arguments and results as `kda`."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    x = Inputs(q, k, v, g, beta, initial_state, scale, factored_tiles(lower_bound), accumulation_dtype(q, k, v, g, beta))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, g, beta, initial_state)):
        result: tuple[Tensor, Tensor] = _Chunked.apply(q, k, v, g, beta, initial_state, segments, scale, x.factored)
        return result
    with torch.no_grad(), exact(q):
        if segments.longest == 1:
            return _decode(x, segments)
        if 1 in segments.lengths:
            return _mixed(x, segments)
        return _chunks(x, segments)


def _decode(x: Inputs, segments: Segments) -> tuple[Tensor, Tensor]:
    """Each sequence has one token, or none."""
    if segments.total == segments.count:
        return kda_step(x.q, x.k, x.v, x.g, x.beta, x.initial_state, scale=x.scale)
    rows = segments.ids.to(x.q.device)
    state = None if x.initial_state is None else x.initial_state.index_select(0, rows)
    o, stepped = kda_step(x.q, x.k, x.v, x.g, x.beta, state, scale=x.scale)
    return o, _resting_states(x, segments).index_copy_(0, rows, stepped)


def _mixed(x: Inputs, segments: Segments) -> tuple[Tensor, Tensor]:
    """Decode and prefill in one call: sequences of one token take the step, the others the chunks."""
    device = x.q.device
    lengths = torch.tensor(segments.lengths)
    single = lengths == 1
    o, final = torch.empty_like(x.v), _resting_states(x, segments)
    for chosen, run in ((single, _decode), (~single, _chunks)):
        tokens = chosen[segments.ids].nonzero()[:, 0].to(device)
        rows = chosen.nonzero()[:, 0].to(device)
        state = None if x.initial_state is None else x.initial_state.index_select(0, rows)
        q, k, v, g, beta = (t.index_select(0, tokens) for t in (x.q, x.k, x.v, x.g, x.beta))
        part = replace(x, q=q, k=k, v=v, g=g, beta=beta, initial_state=state)
        part_o, part_final = run(part, Segments.of(lengths[chosen]))
        o.index_copy_(0, tokens, part_o)
        final.index_copy_(0, rows, part_final)
    return o, final


def _chunks(x: Inputs, segments: Segments) -> tuple[Tensor, Tensor]:
    return chunk_forward(x, make_plan(segments, x.q.shape[1], max(x.q.shape[2], x.v.shape[2]), x.q.device), segments.count, None)


def _resting_states(x: Inputs, segments: Segments) -> Tensor:
    """The states before the call, in a new tensor."""
    if x.initial_state is not None:
        return x.initial_state.to(x.dtype, copy=True)
    return x.v.new_zeros((segments.count, *x.q.shape[1:], x.v.shape[2]), dtype=x.dtype)


class _Chunked(torch.autograd.Function):
    """Saves the inputs, each token's error E and the state before each chunk: T·H·(K + V) numbers; the rest is made again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None,
        segments: Segments,
        scale: float,
        factored: bool,
    ) -> tuple[Tensor, Tensor]:
        x = Inputs(q, k, v, g, beta, initial_state, scale, factored, accumulation_dtype(q, k, v, g, beta))
        kept = Kept()
        with exact(q):
            plan = make_plan(segments, q.shape[1], max(q.shape[2], v.shape[2]), q.device)
            o, final = chunk_forward(x, plan, segments.count, kept)
        ctx.save_for_backward(q, k, v, g, beta, initial_state, *kept.errors, *kept.states)
        ctx.plan, ctx.scale, ctx.factored, ctx.dtype = plan, scale, factored, x.dtype
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, initial_state, *kept = ctx.saved_tensors
        x = Inputs(q, k, v, g, beta, initial_state, ctx.scale, ctx.factored, ctx.dtype)
        groups = len(kept) // 2
        with exact(q):
            grads = chunk_backward(x, ctx.plan, Kept(kept[:groups], kept[groups:]), do, dfinal)
        return grads.q, grads.k, grads.v, grads.g, grads.beta, grads.initial_state, None, None, None
