"""KDA in chunks of 64 tokens: the forward (arXiv 2510.26692 §3; Kimi K3 report §2.1.1).

A chunk that starts in state S, with tiles as `openk3.ops.kda_tiles` makes them (`Q`, `Kg` decayed from the start, `Ke` decayed to the end,
`decay` over the whole chunk, scores A and B):

    E  = (I + B diag(beta))^-1 (V - Kg S)      what each token finds missing in the state it meets
    O  = scale (Q S + A diag(beta) E)
    S' = diag(decay) S + Keᵀ diag(beta) E

Only S passes from chunk to chunk. All else is done for many chunks and heads at once, a group of them at a time.

Letters: M = chunks times heads, C chunk, K key width, V value width, N sequences, n chunks of a group.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from openk3.ops.kda_plan import Band, Group, Step
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
    """What the backward needs beyond the inputs, for each group: its packed E, and the states that its sequences go on with.

    Together T·H·V numbers, and a state for each chunk that is not its sequence's first: with K = V = 128 as many as q and v.
    """

    errors: list[Tensor] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


def members(band: Band, x: Tensor) -> Tensor:
    """The rows of `x` `[N, …]` that belong to the band's sequences; a copy."""
    return x.index_select(0, torch.tensor(band.sequences, device=x.device))


def states_after(step: Step, states: Tensor, heads: int) -> Tensor:
    """Of a group's kept states `[·, K, V]`, those after one of its steps."""
    return states[step.kept * heads : (step.kept + step.going_on) * heads]


def chunk_forward(x: Inputs, plan: tuple[Band, ...], sequences: int, kept: Kept | None) -> tuple[Tensor, Tensor]:
    """`(o, final_state)`; fills in `kept` when given one."""
    H, K, V = x.q.shape[1], x.q.shape[2], x.v.shape[2]
    o = torch.empty_like(x.v, memory_format=torch.contiguous_format)
    if x.initial_state is None:
        final = x.v.new_zeros((sequences, H, K, V), dtype=x.dtype)
    else:
        final = x.initial_state.to(x.dtype, copy=True)
    for band in plan:
        state = None if x.initial_state is None else members(band, final).flatten(0, 1)
        scratch = x.v.new_empty((2, 0 if kept is not None else len(band.sequences) * H, K, V), dtype=x.dtype)
        for group in band.groups:
            state = _run_group(x, band, group, state, o, final, kept, scratch)
    return o, final


def _run_group(
    x: Inputs, band: Band, group: Group, state: Tensor | None, o: Tensor, final: Tensor, kept: Kept | None, scratch: Tensor
) -> Tensor | None:
    """Advance the band's sequences over one group; returns the state after it of those that go on.

    Where nothing is kept, the states alternate between the two of `scratch` `[2, ·, K, V]`.
    """
    H, K = x.q.shape[1:]
    q, k, v, g, beta = (group.gather(t, x.dtype) for t in (x.q, x.k, x.v, x.g, x.beta))
    n, _, C, V = v.shape
    tiles = make_tiles(q, k, g, factored=x.factored, keep=False)
    beta = beta.reshape(n * H, C)
    inverse = unit_lower_inverse(tiles.scores[:, :, 1] * beta[:, None, :])
    missing, out, error = v.new_empty((3, n * H, C, V))
    if kept is None:
        # diag(beta) E at once: E itself is of use to the backward alone.
        inverse.mul_(beta[:, :, None])
        write = error
        states = scratch
    else:
        error, write, states = v.new_empty((n * H, C, V)), error, v.new_empty((group.states * H, K, V))
    rows, A = tiles.rows.view(n * H, 2 * C, K), tiles.scores[:, :, 0]
    with group.writing(o, x.dtype) as o_window:
        for step in group.steps:
            at, chunks = step.head_chunks(H), slice(step.start, step.start + step.count)
            v_step, o_step = v[chunks], o_window[chunks]
            seen = None
            if state is None:
                missing[at].view(v_step.shape).copy_(v_step)
            else:
                seen = torch.bmm(rows[at], state).view(-1, H, C, 2, V)
                torch.sub(v_step, seen[:, :, :, 1], out=missing[at].view(v_step.shape))
            torch.bmm(inverse[at], missing[at], out=error[at])
            if kept is not None:
                torch.mul(error[at], beta[at, :, None], out=write[at])
            inside = torch.baddbmm(out[at], A[at], write[at], beta=0, alpha=x.scale, out=out[at]).view(o_step.shape)
            if seen is None:
                o_step.copy_(inside)
            else:
                torch.add(inside, seen[:, :, :, 0], alpha=x.scale, out=o_step)
            target = states_after(step, states, H) if kept is not None else states[step.index % 2, : step.going_on * H]
            state = _advance(band, step, state, tiles.decay[at], tiles.columns[at], write[at], final, target)
    if kept is not None:
        kept.errors.append(group.pack(error.view(n, H, C, V)))
        kept.states.append(states)
    return state


def _advance(
    band: Band, step: Step, state: Tensor | None, decay: Tensor, columns: Tensor, write: Tensor, final: Tensor, target: Tensor
) -> Tensor | None:
    """Put the states after a step into `target` for the sequences that go on, which is returned, and into `final` for the others."""
    H = final.shape[1]
    split = step.going_on * H

    def after(span: slice, out: Tensor) -> Tensor:
        if state is None:
            return torch.bmm(columns[span].mT, write[span], out=out)
        return torch.mul(state[span], decay[span, :, None], out=out).baddbmm_(columns[span].mT, write[span])

    if step.going_on < step.count:
        ended = torch.tensor(band.sequences[step.going_on : step.count], device=final.device)
        out = final.new_empty((write.shape[0] - split, *final.shape[2:]))
        final.index_copy_(0, ended, after(slice(split, None), out).unflatten(0, (-1, H)))
    return after(slice(0, split), target) if step.going_on else None
