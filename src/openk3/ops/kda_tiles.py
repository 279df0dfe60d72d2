"""The part of KDA that stays inside a chunk: decayed keys and queries, and the two matrices of scores between its tokens.

With `G[r]` the sum of g from the chunk's first token up to r, the scores are, for c <= r,
`A[r, c] = Σ_K q[r] k[c] exp(G[r] - G[c])` and `B[r, c] = Σ_K k[r] k[c] exp(G[r] - G[c])` (arXiv 2510.26692 §3).
`exp(-G[c])` overflows, so no factor of the kind is ever formed. A block of 2s tokens is cut in two halves of s: scores between the halves
take a row's decay from the boundary and a column's decay up to the boundary, both at most 1, and a matrix product does the rest. From one
size of block to the next those decays only get multiplied by the decay of a whole half: one exp(g) a token, no logarithm is summed up,
and a row or column never reads a later token's gate. Blocks double from single tokens to the chunk, for any g <= 0.

Where g >= lower_bound makes a tile's decay representable (16 |lower_bound| <= 80, since exp(80) < 3e38), the blocks start with tiles of 16,
factored about the tile's start: rows times `F = exp(G - G_start)`, columns times `1 / F` (Kimi K3 report §2.1.1).

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

    `rows_q`, `rows_k` `[P, s, K]`: second halves, decayed from the boundary. `columns` `[P, s, K]`: first halves, decayed to the boundary.
    `first`, `second` `[P, 1, K]`: the decay over each whole half.
    """

    rows_q: Tensor
    rows_k: Tensor
    columns: Tensor
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class Tiles:
    """`[M, …]`: queries and keys decayed from the chunk's start, keys decayed to its end, the decay over the chunk, and the scores.

    `A` holds c <= r, `B` c < r; the rest is 0. `levels` (smallest s first), `row_decay` `F` and, for factored tiles, `base` (rows_q, rows_k,
    columns about the tile's start) and `tile_decay` are kept for the backward alone.
    """

    rows_q: Tensor
    rows_k: Tensor
    ends_k: Tensor
    decay: Tensor
    A: Tensor
    B: Tensor
    row_decay: Tensor
    levels: tuple[Level, ...] = ()
    base: tuple[Tensor, Tensor, Tensor] | None = None
    tile_decay: Tensor | None = None


def halves(x: Tensor, s: int) -> tuple[Tensor, Tensor]:
    """The first and the second half of each block of 2s rows: `[M, C, K]` to two views `[M·C / 2s, s, K]`."""
    blocks = x.view(-1, 2, s, x.shape[-1])
    return blocks[:, 0], blocks[:, 1]


def diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """The blocks on the diagonal: `[M, C, C]` to a view `[M, C / size, size, size]`."""
    count = x.shape[-1] // size
    return x.view(-1, count, size, count, size).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)


def prefix_products_(x: Tensor, size: int) -> Tensor:
    """In place: each row of a block of `size` rows becomes the product of the block's rows up to it. A tree, so errors grow as its depth."""
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

    def fresh() -> Tensor:
        return torch.empty((n, H, C, K), dtype=q.dtype, device=q.device)

    F = torch.exp(g, out=fresh()).view(M, C, K)
    if factored:
        prefix_products_(F, TILE)
    wide = F.view(n, H, C, K)
    rows_q = torch.mul(q, wide, out=fresh()).view(M, C, K)
    rows_k = torch.mul(k, wide, out=fresh()).view(M, C, K)
    A, B = (torch.zeros((M, C, C), dtype=q.dtype, device=q.device) for _ in range(2))
    base = tile_decay = None
    if factored:
        columns = torch.div(k, wide, out=fresh()).view(-1, TILE, K)
        tile_q, tile_k = rows_q.view(-1, TILE, K), rows_k.view(-1, TILE, K)
        diagonal_blocks(A, TILE).copy_(torch.bmm(tile_q, columns.mT).tril_().view(M, -1, TILE, TILE))
        diagonal_blocks(B, TILE).copy_(torch.bmm(tile_k, columns.mT).tril_(-1).view(M, -1, TILE, TILE))
        decay = F.view(-1, TILE, K)[:, -1:].contiguous()
        if keep:
            base, tile_decay = (tile_q.clone(), tile_k.clone(), columns), decay
            columns = columns * decay
        else:
            columns.mul_(decay)
        ends_k = columns.view(M, C, K)
        s = TILE
    else:
        A.diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1).view(M, C))
        ends_k = fresh().copy_(k).view(M, C, K)
        decay = F.clone().view(-1, 1, K)
        s = 1
    levels = []
    while s < C:
        first, second = decay.view(-1, 2, 1, K).unbind(1)
        q_half, k_half, end_half = halves(rows_q, s)[1], halves(rows_k, s)[1], halves(ends_k, s)[0]
        diagonal_blocks(A, 2 * s)[:, :, s:, :s] = torch.bmm(q_half, end_half.mT).view(M, -1, s, s)
        diagonal_blocks(B, 2 * s)[:, :, s:, :s] = torch.bmm(k_half, end_half.mT).view(M, -1, s, s)
        if keep:
            levels.append(Level(q_half.clone(), k_half.clone(), end_half.clone(), first, second))
        q_half.mul_(first)
        k_half.mul_(first)
        end_half.mul_(second)
        decay = first * second
        s *= 2
    return Tiles(rows_q, rows_k, ends_k, decay.view(M, K), A, B, F, tuple(levels), base, tile_decay)


def unit_lower_inverse(L: Tensor) -> Tensor:
    """`(I + tril(L, -1))^-1` for `[M, C, C]`, C a multiple of 16: tiles by substitution, then blocks of two joined by products."""
    M, C, _ = L.shape
    inverse = torch.zeros_like(L)
    identity = torch.eye(TILE, dtype=L.dtype, device=L.device)
    tiles = torch.linalg.solve_triangular(diagonal_blocks(L, TILE).contiguous(), identity, upper=False, unitriangular=True)
    diagonal_blocks(inverse, TILE).copy_(tiles)
    s = TILE
    while s < C:
        below = diagonal_blocks(L, 2 * s)[:, :, s:, :s].reshape(-1, s, s)
        blocks = diagonal_blocks(inverse, 2 * s)
        left, right = blocks[:, :, s:, s:].reshape(-1, s, s), blocks[:, :, :s, :s].reshape(-1, s, s)
        blocks[:, :, s:, :s] = torch.bmm(torch.bmm(left, below), right).neg_().view(M, -1, s, s)
        s *= 2
    return inverse
