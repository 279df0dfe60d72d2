"""The part of KDA that stays inside a chunk: decayed keys and queries, and the two matrices of scores between its tokens.

With `G[r]` the sum of g from the chunk's first token up to r, the scores are, for c <= r,
`A[r, c] = Σ_K q[r] k[c] exp(G[r] - G[c])` and `B[r, c] = Σ_K k[r] k[c] exp(G[r] - G[c])` (arXiv 2510.26692 §3).
`exp(-G[c])` overflows, so no factor of the kind is ever formed. A block of 2s tokens is cut in two halves of s: scores between the halves
take a row's decay from the boundary and a column's decay up to the boundary, both at most 1, and a matrix product does the rest. From one
size of block to the next those decays only get multiplied by the decay of a whole half: one exp(g) a token, no logarithm is summed up,
and a row or column never reads a later token's gate. Blocks double from single tokens to the chunk, for any g <= 0.

Where g >= lower_bound makes a tile's decay representable (16 |lower_bound| <= 80, since exp(80) < 3e38), the blocks start with tiles of 16,
factored about the tile's start: rows times `F = exp(G - G_start)`, columns times `1 / F` (Kimi K3 report §2.1.1).

The rows of q and of k take part in the same products. They lie interleaved, q of a token, then k of it, so that they are one matrix.

Letters: M = chunks times heads, C chunk, K key width, s half of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.ops.kda_plan import TILE

# The greatest exponent, in nats, that a factored tile may hold: exp(80) leaves room for the products' sums in fp32.
FACTORED_LIMIT = 80.0


def factored_tiles(lower_bound: float | None) -> bool:
    """Whether a gate with this lower bound allows tiles of 16 to be factored about their start."""
    return lower_bound is not None and TILE * abs(lower_bound) <= FACTORED_LIMIT


@dataclass(frozen=True)
class Level:
    """What scores between the halves of blocks of 2s tokens were made of; P = M·C / 2s blocks.

    `rows` `[P, 2s, K]`: second halves (q and k), decayed from the boundary. `columns` `[P, s, K]`: first halves, decayed to the boundary.
    `first`, `second` `[P, 1, K]`: the decay over each whole half.
    """

    rows: Tensor
    columns: Tensor
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class Base:
    """Tiles of 16 factored about their start: `rows` `[P, 32, K]`, `columns` `[P, 16, K]`, and the `decay` `[P, 1, K]` over each tile."""

    rows: Tensor
    columns: Tensor
    decay: Tensor


@dataclass(frozen=True)
class Tiles:
    """All of a group of chunks that does not depend on the state.

    `rows` `[M, C, 2, K]`: q and k decayed from the chunk's start. `columns` `[M, C, K]`: k decayed to its end. `decay` `[M, K]`: over it.
    `scores` `[M, C, 2, C]`: A (c <= r) and B (c < r), the rest 0. `row_decay` `[M, C, K]`, `levels` (smallest s first) and `base` are what
    they were made of; the last two are kept for the backward alone.
    """

    rows: Tensor
    columns: Tensor
    decay: Tensor
    scores: Tensor
    row_decay: Tensor
    levels: tuple[Level, ...]
    base: Base | None


def halves(x: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """The first and the second half of each block of 2s rows: `[M, rows, K]` to two views `[M·rows / 2s, s, K]`."""
    blocks = x.view(-1, 2, s, x.shape[-1])
    return blocks[:, 0], blocks[:, 1]


def score_blocks(scores: Tensor, s: int) -> Tensor:
    """The scores between the halves of each block of 2s tokens: `[M, C, 2, C]` to a view `[M, C / 2s, 2s, s]`."""
    M, C = scores.shape[:2]
    blocks = scores.view(M, C // (2 * s), 2, 2 * s, C // (2 * s), 2, s)[:, :, 1, :, :, 0]
    return blocks.diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def tile_blocks(scores: Tensor) -> Tensor:
    """The scores inside each tile of 16: `[M, C, 2, C]` to a view `[M, C / 16, 32, 16]`."""
    M, C = scores.shape[:2]
    return scores.view(M, C // TILE, 2 * TILE, C // TILE, TILE).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def clear_future_(tiles: Tensor, *, keep_own: bool) -> Tensor:
    """In place: zero in `[P, 32, 16]` tiles the columns later than the row, in k's rows the token's own too (in q's unless `keep_own`)."""
    row = torch.arange(TILE, device=tiles.device)
    later = row[None, :] >= row[:, None]
    future = torch.stack([later.triu(1) if keep_own else later, later], dim=1).view(2 * TILE, TILE)
    return tiles.masked_fill_(future, 0)


def prefix_products_(x: Tensor, size: int) -> Tensor:
    """In place: each row of a block of `size` rows becomes the product of the block's rows up to it. Errors grow as the tree's depth."""
    s = 1
    while s < size:
        first, second = halves(x, s)
        second.mul_(first[:, -1:])
        s *= 2
    return x


def suffix_sums_(x: Tensor) -> Tensor:
    """In place: each row of `[M, C, K]` becomes the sum of the rows from it to the chunk's end."""
    s = 1
    while s < x.shape[1]:
        first, second = halves(x, s)
        first.add_(second[:, :1])
        s *= 2
    return x


def make_tiles(q: Tensor, k: Tensor, g: Tensor, *, factored: bool, keep: bool) -> Tiles:
    """Scores and decays of n chunks of H heads; q, k, g `[n, H, C, K]` in the dtype to compute in, of any strides. M = n·H.

    `keep` also returns what the backward needs.
    """
    n, H, C, K = q.shape
    M = n * H
    F, columns = q.new_empty((2, n, H, C, K))
    rows = q.new_empty((n, H, C, 2, K))
    scores = q.new_zeros((M, C, 2, C))
    # Copied first: torch's exp of a strided tensor is several times slower on two threads than on one.
    F.copy_(g).exp_()
    if factored:
        prefix_products_(F.view(M, C, K), TILE)
    torch.mul(q, F, out=rows[:, :, :, 0])
    torch.mul(k, F, out=rows[:, :, :, 1])
    row_decay, columns, rows = F.view(M, C, K), columns.view(M, C, K), rows.view(M, 2 * C, K)
    base = None
    if factored:
        torch.div(k, F, out=columns.view(n, H, C, K))
        tile_rows, tile_columns = rows.view(-1, 2 * TILE, K), columns.view(-1, TILE, K)
        decay = row_decay.view(-1, TILE, K)[:, -1:]
        tiles = clear_future_(torch.bmm(tile_rows, tile_columns.mT), keep_own=True)
        tile_blocks(scores).copy_(tiles.view(M, -1, 2 * TILE, TILE))
        if keep:
            base = Base(tile_rows.clone(), tile_columns, decay)
            columns = (tile_columns * decay).view(M, C, K)
        else:
            tile_columns.mul_(decay)
        s = TILE
    else:
        scores[:, :, 0].diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1).view(M, C))
        columns.view(n, H, C, K).copy_(k)
        decay = row_decay.view(-1, 1, K)
        s = 1
    levels = []
    while s < C:
        first, second = decay.view(-1, 2, 1, K).unbind(1)
        row_half, column_half = halves(rows, 2 * s)[1], halves(columns, s)[0]
        score_blocks(scores, s).copy_(torch.bmm(row_half, column_half.mT).view(M, -1, 2 * s, s))
        if keep:
            levels.append(Level(row_half.clone(), column_half.clone(), first, second))
        row_half.mul_(first)
        column_half.mul_(second)
        decay = first * second
        s *= 2
    return Tiles(rows.view(M, C, 2, K), columns, decay.view(M, K), scores, row_decay, tuple(levels), base)


def unit_lower_inverse(L: Tensor) -> Tensor:
    """`(I + tril(L, -1))^-1` for `[M, C, C]`, C a multiple of 16: tiles by substitution, then blocks of two joined by products."""
    M, C, _ = L.shape
    inverse = torch.zeros_like(L)

    def blocks(x: Tensor, size: int) -> Tensor:
        return x.view(M, C // size, size, C // size, size).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)

    identity = torch.eye(TILE, dtype=L.dtype, device=L.device)
    tiles = torch.linalg.solve_triangular(blocks(L, TILE).contiguous(), identity, upper=False, unitriangular=True)
    blocks(inverse, TILE).copy_(tiles)
    s = TILE
    while s < C:
        below = blocks(L, 2 * s)[:, :, s:, :s].reshape(-1, s, s)
        joined = blocks(inverse, 2 * s)
        left, right = joined[:, :, s:, s:].reshape(-1, s, s), joined[:, :, :s, :s].reshape(-1, s, s)
        joined[:, :, s:, :s] = torch.bmm(torch.bmm(left, below), right).neg_().view(M, -1, s, s)
        s *= 2
    return inverse
