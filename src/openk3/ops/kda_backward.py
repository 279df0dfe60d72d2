"""Gradients of KDA's chunked form, from what each chunk saw: no array grows as T·H·C·K, tiles are made again group by group.

With `dO` times scale, and `dS'` the gradient of the state after a chunk (see `openk3.ops.kda_chunk` for the forward; W = diag(beta) E):

    dW  = Aᵀ dO + Ke dS'                    dE' = (I + diag(beta) B)^-ᵀ dW       dbeta = Σ_V dE' E
    dV  = diag(beta) dE'                    dA = tril(dO Wᵀ)                     dB = -tril(dV Wᵀ, -1)
    dQ  = dO Sᵀ                             dKg = -dV Sᵀ                         dKe = W dS'ᵀ
    dS  = diag(decay) dS' + Qᵀ dO - Kgᵀ dV

Every term of q, k and the scores is a product with exp of a sum of g between two tokens. Such a term x, between tokens c < r, adds x to the
gradient of every g in (c, r]: it is added at r, subtracted at c, and summed from the chunk's end. Terms without decay (c = r, and what the
chunk's last token writes to S') stay out of that sum, whose error would otherwise be as large as theirs where the decay is strong.

Letters: M = chunks times heads, C chunk, K key width, V value width, N sequences, n chunks of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from openk3.ops.kda_chunk import Inputs, Kept, members, states_after
from openk3.ops.kda_plan import TILE, Band, Group, Step
from openk3.ops.kda_tiles import Tiles, clear_future_, halves, make_tiles, score_blocks, suffix_sums_, tile_blocks, unit_lower_inverse


class Gradients:
    """Gradients of the op's inputs, filled in group by group, in the inputs' dtypes."""

    def __init__(self, x: Inputs) -> None:
        self.q, self.k, self.v, self.g, self.beta = (
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x.q, x.k, x.v, x.g, x.beta)
        )
        self.initial_state = None if x.initial_state is None else torch.zeros_like(x.initial_state)


def chunk_backward(x: Inputs, plan: tuple[Band, ...], kept: Kept, do: Tensor | None, dfinal: Tensor | None) -> Gradients:
    """Gradients from those of o and of the final state (None: no gradient)."""
    H = x.q.shape[1]
    grads = Gradients(x)
    do = torch.zeros_like(x.v) if do is None else do
    if grads.initial_state is not None and dfinal is not None:
        grads.initial_state.copy_(dfinal)
    for band in plan:
        initial = None if x.initial_state is None else members(band, x.initial_state).to(x.dtype).flatten(0, 1)
        befores = [initial, *(states_after(group.steps[-1], kept.states[group.number], H) for group in band.groups[:-1])]
        dstate: Tensor | None = None
        for group, before in zip(reversed(band.groups), reversed(befores), strict=True):
            dstate = _group_backward(x, band, group, before, kept, do, dfinal, dstate, grads)
        if grads.initial_state is not None and dstate is not None:
            numbers = torch.tensor(band.sequences, device=dstate.device)
            grads.initial_state.index_copy_(0, numbers, dstate.unflatten(0, (-1, H)).to(grads.initial_state.dtype))
    return grads


def _incoming(band: Band, step: Step, dstate: Tensor | None, dfinal: Tensor | None, x: Inputs) -> Tensor | None:
    """Gradient of the states after a step, `[count·H, K, V]`: the next step's for those that go on, the final state's for the others."""
    if step.going_on == step.count:
        return dstate
    H, K, V = x.q.shape[1], x.q.shape[2], x.v.shape[2]
    ended = band.sequences[step.going_on : step.count]
    if dfinal is not None:
        last = dfinal.index_select(0, torch.tensor(ended, device=dfinal.device)).to(x.dtype).flatten(0, 1)
    elif dstate is not None:
        last = x.v.new_zeros((len(ended) * H, K, V), dtype=x.dtype)
    else:
        return None
    return last if dstate is None else torch.cat([dstate, last])


def _group_backward(
    x: Inputs,
    band: Band,
    group: Group,
    before: Tensor | None,
    kept: Kept,
    do: Tensor,
    dfinal: Tensor | None,
    dstate: Tensor | None,
    grads: Gradients,
) -> Tensor | None:
    """Fill in the gradients of a group's tokens.

    `before`: the states in which the group's first step started (None: zeros). `dstate`: the gradient of the states after the group;
    that of the states before it is returned.
    """
    H = x.q.shape[1]
    q, k, g, beta, do = (group.gather(t, x.dtype) for t in (x.q, x.k, x.g, x.beta, do))
    n, _, C, V = do.shape
    M, K = n * H, x.q.shape[2]
    tiles = make_tiles(q, k, g, factored=x.factored, keep=True)
    beta = beta.reshape(M, C, 1)
    minus_beta = beta.neg()
    inverse = unit_lower_inverse(tiles.scores[:, :, 1] * beta)
    error = group.unpack(kept.errors[group.number]).reshape(M, C, V)
    write = error * beta
    # Beside each other as the rows of q and k are: the gradient of scale·o, and that of -V.
    outward = q.new_empty((M, C, 2, V))
    torch.mul(do, x.scale, out=outward.view(n, H, C, 2, V)[:, :, :, 0])
    dwrite = torch.bmm(tiles.scores[:, :, 0].mT, outward[:, :, 0])
    dmissing = torch.empty_like(dwrite)
    drows = q.new_empty((M, 2 * C, K))
    dcolumns = q.new_empty((M, C, K))
    dend = q.new_zeros((M, K))
    rows, dv_minus, both = tiles.rows.view(M, 2 * C, K), outward[:, :, 1], outward.view(M, 2 * C, V)
    befores = [before, *(states_after(step, kept.states[group.number], H) for step in group.steps[:-1])]
    for step, state in zip(reversed(group.steps), reversed(befores), strict=True):
        at = step.head_chunks(H)
        after = _incoming(band, step, dstate, dfinal, x)
        if after is None:
            dcolumns[at].zero_()
        else:
            dwrite[at].baddbmm_(tiles.columns[at], after)
            torch.bmm(write[at], after.mT, out=dcolumns[at])
        torch.bmm(inverse[at].mT, dwrite[at], out=dmissing[at])
        torch.mul(dmissing[at], minus_beta[at], out=dv_minus[at])
        if state is None:
            drows[at].zero_()
            dstate = None
            continue
        torch.bmm(both[at], state.mT, out=drows[at])
        if after is None:
            dstate = torch.bmm(rows[at].mT, both[at])
        else:
            torch.mul((state * after).sum(-1), tiles.decay[at], out=dend[at])
            dstate = (after * tiles.decay[at, :, None]).baddbmm_(rows[at].mT, both[at])
    dscores = torch.bmm(both, write.mT).view(M, C, 2, C)
    with group.writing(grads.v, x.dtype) as dv:
        torch.neg(dv_minus.view(n, H, C, V), out=dv)
    with group.writing(grads.beta, x.dtype) as dbeta:
        torch.sum(dmissing.mul_(error).view(n, H, C, V), -1, out=dbeta)
    _tiles_backward(q, k, tiles, dscores, drows, dcolumns, dend, group, grads)
    return dstate


def _tiles_backward(
    q: Tensor,
    k: Tensor,
    tiles: Tiles,
    dscores: Tensor,
    drows: Tensor,
    dcolumns: Tensor,
    dend: Tensor,
    group: Group,
    grads: Gradients,
) -> None:
    """From the gradients of the tiles to those of q, k and g; `dend` `[M, K]`: what the state gives to that of the decay over the chunk."""
    n, H, C, K = q.shape
    M = n * H
    own = dscores[:, :, 0].diagonal(dim1=1, dim2=2).unsqueeze(-1).clone().view(n, H, C, 1)
    last = (torch.arange(n, device=q.device), slice(None), group.last)
    written_last = dcolumns.view(n, H, C, K)[last]
    dcolumns.view(n, H, C, K)[last] = 0
    dend += (tiles.columns * dcolumns).sum(1)
    s = C // 2
    for level in reversed(tiles.levels):
        block = score_blocks(dscores, s).reshape(-1, 2 * s, s)
        row_half, column_half = halves(drows, 2 * s)[1], halves(dcolumns, s)[0]
        torch.addcmul(torch.bmm(block, level.columns), row_half, level.first, out=row_half)
        torch.addcmul(torch.bmm(block.mT, level.rows), column_half, level.second, out=column_half)
        s //= 2
    if tiles.base is not None:
        block = clear_future_(tile_blocks(dscores).reshape(-1, 2 * TILE, TILE), keep_own=False)
        drows.view(-1, 2 * TILE, K).baddbmm_(block, tiles.base.columns)
        dcolumns.view(-1, TILE, K).mul_(tiles.base.decay).baddbmm_(block.mT, tiles.base.rows)
        dcolumns.div_(tiles.row_decay)
    drows.view(M, C, 2, K).mul_(tiles.row_decay[:, :, None])
    dq, dk_row = drows.view(n, H, C, 2, K).unbind(3)
    dk_column = dcolumns.view(n, H, C, K)
    dg = q.new_empty((n, H, C, K))
    torch.mul(q, dq, out=dg).addcmul_(k, dk_row - dk_column)
    with group.writing(grads.g, q.dtype) as window:
        torch.add(suffix_sums_(dg.view(M, C, K)).view(n, H, C, K), dend.view(n, H, 1, K), out=window)
    with group.writing(grads.q, q.dtype) as window:
        torch.addcmul(dq, own, k, out=window)
    dk = dk_column.add_(dk_row)
    dk[last] += written_last
    with group.writing(grads.k, q.dtype) as window:
        torch.addcmul(dk, own, q, out=window)
