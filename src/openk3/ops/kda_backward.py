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

from openk3.ops.kda_chunk import Inputs, Kept, members
from openk3.ops.kda_plan import TILE, Band, Group, Plan, Step
from openk3.ops.kda_tiles import Tiles, diagonal_blocks, halves, make_tiles, suffix_sums_, unit_lower_inverse


class Gradients:
    """Gradients of the op's inputs, filled in group by group, in the inputs' dtypes."""

    def __init__(self, x: Inputs) -> None:
        self.q, self.k, self.v, self.g, self.beta = (
            torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x.q, x.k, x.v, x.g, x.beta)
        )
        self.initial_state = None if x.initial_state is None else torch.zeros_like(x.initial_state)


def chunk_backward(x: Inputs, plan: Plan, kept: Kept, do: Tensor | None, dfinal: Tensor | None) -> Gradients:
    """Gradients from those of o and of the final state (None: no gradient)."""
    grads = Gradients(x)
    do = torch.zeros_like(x.v) if do is None else do
    if x.initial_state is not None and dfinal is not None:
        assert grads.initial_state is not None
        grads.initial_state.copy_(dfinal)
    for band in plan.bands:
        dstate: Tensor | None = None
        for group in reversed(band.groups):
            dstate = _group_backward(x, band, group, kept, do, dfinal, dstate, grads)
        if grads.initial_state is not None and dstate is not None:
            H = x.q.shape[1]
            numbers = torch.tensor(band.sequences, device=dstate.device)
            grads.initial_state.index_copy_(0, numbers, dstate.unflatten(0, (-1, H)).to(grads.initial_state.dtype))
    return grads


def _incoming(band: Band, step: Step, dstate: Tensor | None, dfinal: Tensor | None, x: Inputs) -> Tensor | None:
    """Gradient of the states after a step, `[count·H, K, V]`: of those that go on from the next step, of the others from the final state."""
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
    x: Inputs, band: Band, group: Group, kept: Kept, do: Tensor, dfinal: Tensor | None, dstate: Tensor | None, grads: Gradients
) -> Tensor | None:
    """Fill in the gradients of a group's tokens; takes and returns the gradient of the states after and before the group."""
    H = x.q.shape[1]
    q, k, g, beta, dout, error = (group.gather(t, x.dtype) for t in (x.q, x.k, x.g, x.beta, do, kept.errors))
    n, _, C, V = dout.shape
    M, K = n * H, x.q.shape[2]
    tiles = make_tiles(q, k, g, factored=x.factored, keep=True)
    beta = beta.reshape(M, C)
    inverse = unit_lower_inverse(tiles.B * beta[:, :, None])
    dout = (dout * x.scale).reshape(M, C, V)
    error = error.reshape(M, C, V)
    write = error * beta[:, :, None]
    dwrite = torch.bmm(tiles.A.mT, dout)
    dmissing, dv = torch.empty_like(dwrite), torch.empty_like(dwrite)
    drows_q, drows_k, dends_k = (torch.empty_like(tiles.rows_q) for _ in range(3))
    dend = torch.zeros_like(tiles.decay)
    for step in reversed(group.steps):
        span = slice(step.start * H, (step.start + step.count) * H)
        after = _incoming(band, step, dstate, dfinal, x)
        if after is None:
            dends_k[span].zero_()
        else:
            dwrite[span].baddbmm_(tiles.ends_k[span], after)
            torch.bmm(write[span], after.mT, out=dends_k[span])
        torch.bmm(inverse[span].mT, dwrite[span], out=dmissing[span])
        torch.mul(dmissing[span], beta[span, :, None], out=dv[span])
        before: Tensor | None
        if step.index:
            before = kept.states[step.before : step.before + step.count].flatten(0, 1)
        else:
            before = None if x.initial_state is None else members(band, x.initial_state).to(x.dtype).flatten(0, 1)
        if before is None:
            drows_q[span].zero_()
            drows_k[span].zero_()
            dstate = None
            continue
        torch.bmm(dout[span], before.mT, out=drows_q[span])
        torch.baddbmm(drows_k[span], dv[span], before.mT, beta=0, alpha=-1, out=drows_k[span])
        if after is None:
            dstate = torch.bmm(tiles.rows_q[span].mT, dout[span])
        else:
            torch.mul((before * after).sum(-1), tiles.decay[span], out=dend[span])
            dstate = (after * tiles.decay[span, :, None]).baddbmm_(tiles.rows_q[span].mT, dout[span])
        dstate.baddbmm_(tiles.rows_k[span].mT, dv[span], alpha=-1)
    last = (torch.arange(n, device=q.device), slice(None), group.last)
    direct_k = dends_k.view(n, H, C, K)[last]
    dends_k.view(n, H, C, K)[last] = 0
    dend += (tiles.ends_k * dends_k).sum(1)
    dA = torch.bmm(dout, write.mT)
    dB = torch.bmm(dv, write.mT).neg_().tril_(-1)
    group.store(grads.v, dv.view(n, H, C, V))
    group.store(grads.beta, (dmissing * error).sum(-1).view(n, H, C))
    _tiles_backward(q, k, tiles, dA, dB, drows_q, drows_k, dends_k, dend, direct_k, group, grads)
    return dstate


def _tiles_backward(
    q: Tensor,
    k: Tensor,
    tiles: Tiles,
    dA: Tensor,
    dB: Tensor,
    drows_q: Tensor,
    drows_k: Tensor,
    dends_k: Tensor,
    dend: Tensor,
    direct_k: Tensor,
    group: Group,
    grads: Gradients,
) -> None:
    """From the gradients of the tiles to those of q, k and g.

    `dend` `[M, K]` is the gradient of the log decay over the whole chunk, `direct_k` `[n, H, K]` that of k of each chunk's last token as
    it is written to the state.
    """
    n, H, C, K = q.shape
    M = n * H
    direct = dA.diagonal(dim1=1, dim2=2).unsqueeze(-1).clone().view(n, H, C, 1)
    dA.tril_(-1)
    s = C // 2
    for level in reversed(tiles.levels):
        dA_block = diagonal_blocks(dA, 2 * s)[:, :, s:, :s].reshape(-1, s, s)
        dB_block = diagonal_blocks(dB, 2 * s)[:, :, s:, :s].reshape(-1, s, s)
        q_half, k_half, end_half = halves(drows_q, s)[1], halves(drows_k, s)[1], halves(dends_k, s)[0]
        torch.addcmul(torch.bmm(dA_block, level.columns), q_half, level.first, out=q_half)
        torch.addcmul(torch.bmm(dB_block, level.columns), k_half, level.first, out=k_half)
        dcolumns = torch.bmm(dA_block.mT, level.rows_q).baddbmm_(dB_block.mT, level.rows_k)
        torch.addcmul(dcolumns, end_half, level.second, out=end_half)
        s //= 2
    if tiles.base is not None:
        assert tiles.tile_decay is not None
        base_q, base_k, columns = tiles.base
        dA_tile = diagonal_blocks(dA, TILE).reshape(-1, TILE, TILE)
        dB_tile = diagonal_blocks(dB, TILE).reshape(-1, TILE, TILE)
        drows_q.view(-1, TILE, K).baddbmm_(dA_tile, columns)
        drows_k.view(-1, TILE, K).baddbmm_(dB_tile, columns)
        dcolumns = dends_k.view(-1, TILE, K).mul_(tiles.tile_decay)
        dcolumns.baddbmm_(dA_tile.mT, base_q).baddbmm_(dB_tile.mT, base_k)
        dends_k.div_(tiles.row_decay)
    dq = drows_q.mul_(tiles.row_decay).view(n, H, C, K)
    dk_row = drows_k.mul_(tiles.row_decay).view(n, H, C, K)
    dk_column = dends_k.view(n, H, C, K)
    dg = torch.mul(q, dq, out=torch.empty_like(dq)).addcmul_(k, dk_row - dk_column).view(M, C, K)
    suffix_sums_(dg).add_(dend[:, None])
    group.store(grads.g, dg.view(n, H, C, K))
    group.store(grads.q, dq.addcmul_(direct, k))
    dk = dk_row.add_(dk_column).addcmul_(direct, q)
    dk[torch.arange(n, device=q.device), :, group.last] += direct_k
    group.store(grads.k, dk)
