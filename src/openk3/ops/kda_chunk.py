"""KDA in chunks of 64 tokens (arXiv 2510.26692 §3; Kimi K3 report §2.1.1): the forward, and the autograd function around it.

A chunk that starts in state S, with tiles as `openk3.ops.kda_tiles` makes them (`Q`, `Kg` decayed from the start, `Ke` decayed to the end,
`decay` over the whole chunk, scores A and B):

    E  = (I + B diag(beta))^-1 (V - Kg S)      what each token finds missing in the state it meets
    O  = scale (Q S + A diag(beta) E)
    S' = diag(decay) S + Keᵀ diag(beta) E

Only S passes from chunk to chunk. All else is done for many chunks and heads at once, a group of them at a time.

Letters: M = chunks times heads, C chunk, K key width, V value width, N sequences, n chunks of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.ops.kda_plan import Band, Group, Plan, Step
from openk3.ops.kda_tiles import make_tiles, unit_lower_inverse


@dataclass(frozen=True)
class Inputs:
    """Arguments of the op, and the dtype to compute in."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor | None
    scale: float
    factored: bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Kept:
    """What the backward needs beyond the inputs: E `[T, H, V]`, and the state before each chunk that is not its sequence's first."""

    errors: Tensor
    states: Tensor


def members(band: Band, x: Tensor) -> Tensor:
    """The rows of `x` `[N, …]` that belong to the band's sequences; a copy."""
    return x.index_select(0, torch.tensor(band.sequences, device=x.device))


def chunk_forward(x: Inputs, plan: Plan, sequences: int, keep: bool) -> tuple[Tensor, Tensor, Kept | None]:
    """`(o, final_state, what to keep)`."""
    T, H, K = x.q.shape
    V = x.v.shape[-1]
    o = torch.empty_like(x.v, memory_format=torch.contiguous_format)
    if x.initial_state is None:
        final = x.v.new_zeros((sequences, H, K, V), dtype=x.dtype)
    else:
        final = x.initial_state.to(x.dtype, copy=True)
    kept = None
    if keep:
        kept = Kept(x.v.new_empty((T, H, V), dtype=x.dtype), x.v.new_empty((plan.states, H, K, V), dtype=x.dtype))
    for band in plan.bands:
        state = None if x.initial_state is None else members(band, final).flatten(0, 1)
        scratch = None if keep else x.v.new_empty((2, len(band.sequences) * H, K, V), dtype=x.dtype)
        for group in band.groups:
            state = _run_group(x, band, group, state, o, final, kept, scratch)
    return o, final, kept


def _run_group(
    x: Inputs, band: Band, group: Group, state: Tensor | None, o: Tensor, final: Tensor, kept: Kept | None, scratch: Tensor | None
) -> Tensor | None:
    """Advance the band's sequences over one group; returns the state after it of those that go on."""
    H = x.q.shape[1]
    q, k, v, g, beta = (group.gather(t, x.dtype) for t in (x.q, x.k, x.v, x.g, x.beta))
    n, _, C, V = v.shape
    tiles = make_tiles(q, k, g, factored=x.factored, keep=False)
    rows, A, B = tiles.rows.view(n * H, 2 * C, -1), tiles.scores[:, :, 0], tiles.scores[:, :, 1]
    beta = beta.reshape(n * H, C)
    inverse = unit_lower_inverse(B * beta[:, None, :])
    if kept is None:
        inverse.mul_(beta[:, :, None])
    missing, write, out = v.new_empty((3, n * H, C, V))
    error = None if kept is None else torch.empty_like(write)
    with group.writing(o, x.dtype) as o_window:
        for step in group.steps:
            chunks = slice(step.start, step.start + step.count)
            span = slice(step.start * H, (step.start + step.count) * H)
            if state is None:
                missing[span].view(-1, H, C, V).copy_(v[chunks])
            else:
                seen = torch.bmm(rows[span], state).view(-1, H, C, 2, V)
                torch.sub(v[chunks], seen[:, :, :, 1], out=missing[span].view(-1, H, C, V))
            if error is None:
                torch.bmm(inverse[span], missing[span], out=write[span])
            else:
                torch.bmm(inverse[span], missing[span], out=error[span])
                torch.mul(error[span], beta[span, :, None], out=write[span])
            new = torch.baddbmm(out[span], A[span], write[span], beta=0, alpha=x.scale, out=out[span]).view(-1, H, C, V)
            if state is None:
                o_window[chunks].copy_(new)
            else:
                torch.add(new, seen[:, :, :, 0], alpha=x.scale, out=o_window[chunks])
            state = _advance(band, step, state, tiles.decay[span], tiles.columns[span], write[span], final, kept, scratch)
    if kept is not None and error is not None:
        with group.writing(kept.errors, x.dtype) as window:
            window.copy_(error.view(n, H, C, V))
    return state


def _advance(
    band: Band,
    step: Step,
    state: Tensor | None,
    decay: Tensor,
    columns: Tensor,
    write: Tensor,
    final: Tensor,
    kept: Kept | None,
    scratch: Tensor | None,
) -> Tensor | None:
    """The state after a step of the sequences that go on; that of the others is put into `final`."""
    H = final.shape[1]
    split = step.going_on * H

    def after(span: slice, out: Tensor) -> Tensor:
        if state is None:
            return torch.bmm(columns[span].mT, write[span], out=out)
        return torch.mul(state[span], decay[span, :, None], out=out).baddbmm_(columns[span].mT, write[span])

    if step.going_on < step.count:
        ended = torch.tensor(band.sequences[step.going_on : step.count], device=final.device)
        out = torch.empty((write.shape[0] - split, *final.shape[2:]), dtype=final.dtype, device=final.device)
        final.index_copy_(0, ended, after(slice(split, None), out).unflatten(0, (-1, H)))
    if not step.going_on:
        return None
    if kept is not None:
        target = kept.states[step.after : step.after + step.going_on].flatten(0, 1)
    else:
        assert scratch is not None
        target = scratch[step.index % 2, :split]
    return after(slice(0, split), target)
