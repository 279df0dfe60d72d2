"""Softmax attention over ragged sequences: expanded heads, and absorbed over latents (Kimi K3 report §2.1.2).

Letters: T new tokens, S keys, H heads, B heads of all the sequences of one group, K key width, V value width, R latent rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import pick
from openk3.ops.precision import accumulation_dtype, exact
from openk3.ops.segments import Segments

# Query rows a block: long enough for the matrix library, short enough that little above the diagonal is computed.
_ROWS = 128
_FEWEST_ROWS = 16
# Scores held at a time: 4 MiB in fp32, so that they stay in a core's share of the cache between the passes over them.
_SCORES = 1 << 20


def causal_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, context: Segments, scale: float) -> Tensor:
    """Causal attention of new tokens over everything that their sequence holds so far.

    `q [T, H, K]`, `k [S, H, K]` and `v [S, H, V]` give `[T, H, V]` in `v.dtype`. Sequence n has `segments.lengths[n]` new tokens, which are
    the last of its `context.lengths[n]` keys. The softmax is taken in fp32, the probabilities are cast to `v.dtype`.
    Temporaries and saved tensors grow with T + S, never with their product.

    Raises ValueError for shapes that do not fit each other or a sequence with fewer keys than new tokens.
    """
    _check_causal(q, k, v, segments, context)
    with exact(q):
        return pick({"reference": causal_attention_reference, "torch": _CausalAttention.apply}, q)(q, k, v, segments, context, scale)


def causal_attention_reference(q: Tensor, k: Tensor, v: Tensor, segments: Segments, context: Segments, scale: float) -> Tensor:
    """Sequence by sequence: `softmax(q kᵀ · scale, causal) v`."""
    acc = accumulation_dtype(q)
    outputs = [v[:0]]
    for start, length, key_start, key_length in zip(segments.starts, segments.lengths, context.starts, context.lengths, strict=True):
        q_HTK = q[start : start + length].transpose(0, 1)
        k_HSK = k[key_start : key_start + key_length].transpose(0, 1)
        v_HSV = v[key_start : key_start + key_length].transpose(0, 1)
        score_HTS = (q_HTK @ k_HSK.transpose(1, 2)).to(acc) * scale
        future_TS = torch.ones(length, key_length, dtype=torch.bool, device=q.device).triu(key_length - length + 1)
        p_HTS = torch.softmax(score_HTS.masked_fill(future_TS, -torch.inf), -1).to(v.dtype)
        outputs.append((p_HTS @ v_HSV).transpose(0, 1))
    return torch.cat(outputs)


def absorbed_attention(q: Tensor, latents: Sequence[Tensor], segments: Segments, rank: int, scale: float) -> Tensor:
    """Attention over latents that all heads share: each latent is a key, and its first `rank` numbers are its value.

    `q [T, H, R + r]` and, for sequence n, `latents[n] [S_n, R + r]` give `[T, H, R]` in `q.dtype`. Sequence n's new tokens are the last of
    its latents and causal among themselves. A sequence's result does not depend, to the bit, on the others in the call. Latents are
    copied only where their dtype is narrower than q's.

    Raises ValueError for shapes that do not fit each other.
    """
    if len(latents) != segments.count or segments.total != q.shape[0]:
        raise ValueError(f"{len(latents)} latents and queries {tuple(q.shape)} for {segments.count} sequences of {segments.total} tokens")
    out = []
    with exact(q):
        for start, length, latent in zip(segments.starts, segments.lengths, latents, strict=True):
            if latent.shape[0] < length or latent.shape[1] != q.shape[2]:
                raise ValueError(f"latents {tuple(latent.shape)} for {length} new tokens of width {q.shape[2]}")
            out.append(_absorbed(q[start : start + length], latent, rank, scale))
    return torch.cat(out) if out else q.new_zeros(0, q.shape[1], rank)


def _absorbed(q_THC: Tensor, latent_SC: Tensor, rank: int, scale: float) -> Tensor:
    length, heads, keys = q_THC.shape[0], q_THC.shape[1], latent_SC.shape[0]
    dtype = torch.promote_types(q_THC.dtype, latent_SC.dtype)
    latent_SC = latent_SC.to(dtype)
    rows = max(1, _SCORES // max(1, heads * keys))
    blocks = [q_THC.new_zeros(0, heads, rank)]
    for first in range(0, length, rows):
        q_QC = q_THC[first : first + rows].to(dtype).flatten(0, 1)
        tokens = q_QC.shape[0] // heads
        seen = keys - length + first + tokens
        score_THS = (q_QC @ latent_SC[:seen].t()).to(accumulation_dtype(q_QC)).view(tokens, heads, seen) * scale
        if tokens > 1:
            future = torch.ones(tokens, seen, dtype=torch.bool, device=q_QC.device).triu(seen - tokens + 1)
            score_THS = score_THS.masked_fill(future[:, None], -torch.inf)
        p_QS = torch.softmax(score_THS, -1).to(dtype).flatten(0, 1)
        blocks.append((p_QS @ latent_SC[:seen, :rank]).view(tokens, heads, rank).to(q_THC.dtype))
    return torch.cat(blocks[1:]) if len(blocks) > 2 else blocks[-1]


def _check_causal(q: Tensor, k: Tensor, v: Tensor, segments: Segments, context: Segments) -> None:
    if q.shape[1:] != k.shape[1:] or k.shape[:2] != v.shape[:2] or q.dtype != k.dtype or k.dtype != v.dtype:
        raise ValueError(f"q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype} and v {tuple(v.shape)} {v.dtype} do not fit")
    segments.check(q.shape[0])
    context.check(k.shape[0])
    if segments.count != context.count:
        raise ValueError(f"{segments.count} sequences of new tokens, but {context.count} contexts")
    for sequence, (new, keys) in enumerate(zip(segments.lengths, context.lengths, strict=True)):
        if keys < new:
            raise ValueError(f"sequence {sequence} has {new} new tokens, but its context holds only {keys}")


@dataclass(frozen=True)
class _Group:
    """Sequences with equal lengths and equal contexts: one batched product does them all, so that many short ones cost few calls."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    length: int
    context: int

    def heads(self, x_THK: Tensor, *, keys: bool) -> Tensor:
        """The group's rows of `x` as `[B, length or context, width]`: a view for a single sequence, otherwise a copy."""
        starts, length = (self.keys, self.context) if keys else (self.queries, self.length)
        if len(starts) == 1:
            return x_THK[starts[0] : starts[0] + length].transpose(0, 1)
        rows = _rows(starts, length, x_THK.device)
        return x_THK[rows].view(len(starts), length, *x_THK.shape[1:]).transpose(1, 2).flatten(0, 1)

    def empty_like_heads(self, x_THK: Tensor, *, keys: bool) -> Tensor:
        """Somewhere to write `[B, length or context, width]`: the rows of `x` themselves for a single sequence."""
        if len(self.queries) == 1:
            return self.heads(x_THK, keys=keys)
        return x_THK.new_empty(len(self.queries) * x_THK.shape[1], self.context if keys else self.length, x_THK.shape[2])

    def put(self, x_THK: Tensor, values_BTK: Tensor, *, keys: bool) -> None:
        """Bring what was written to `empty_like_heads` to its rows of `x`."""
        if len(self.queries) > 1:
            starts, length = (self.keys, self.context) if keys else (self.queries, self.length)
            values = values_BTK.view(len(starts), x_THK.shape[1], length, -1).transpose(1, 2).flatten(0, 1)
            x_THK[_rows(starts, length, x_THK.device)] = values


def _rows(starts: tuple[int, ...], length: int, device: torch.device) -> Tensor:
    return (torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)).flatten()


def _groups(segments: Segments, context: Segments) -> list[_Group]:
    members: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for start, length, key_start, key_length in zip(segments.starts, segments.lengths, context.starts, context.lengths, strict=True):
        if length:
            members.setdefault((length, key_length), []).append((start, key_start))
    return [_Group(tuple(s for s, _ in at), tuple(s for _, s in at), *lengths) for lengths, at in members.items()]


def _blocks(batch: int, length: int, context: int) -> Iterator[tuple[slice, slice, int]]:
    """(slice of B, slice of the new tokens, number of keys that the last of these sees)."""
    rows = min(length, max(_FEWEST_ROWS, min(_ROWS, _SCORES // context)))
    heads = max(1, _SCORES // (rows * context))
    for head in range(0, batch, heads):
        for row in range(0, length, rows):
            end = min(row + rows, length)
            yield slice(head, min(head + heads, batch)), slice(row, end), context - length + end


class _Scratch:
    """Three buffers of scores, reused by every block."""

    def __init__(self, q_BTK: Tensor, context: int, scale: float) -> None:
        self.acc = accumulation_dtype(q_BTK)
        self.scale = scale
        sizes = [(b.stop - b.start) * (t.stop - t.start) * seen for b, t, seen in _blocks(q_BTK.shape[0], q_BTK.shape[1], context)]
        self._buffers = q_BTK.new_empty(3, max(sizes), dtype=self.acc)

    def view(self, index: int, like: Tensor, keys: int) -> Tensor:
        batch, rows = like.shape[:2]
        return self._buffers[index, : batch * rows * keys].view(batch, rows, keys)

    def product(self, index: int, a_BTK: Tensor, b_BSK: Tensor, alpha: float = 1.0) -> Tensor:
        """`alpha · a bᵀ` in buffer `index`."""
        out = self.view(index, a_BTK, b_BSK.shape[1])
        if a_BTK.dtype == self.acc:
            return torch.baddbmm(out, a_BTK, b_BSK.transpose(1, 2), beta=0, alpha=alpha, out=out)
        return torch.mul(torch.bmm(a_BTK, b_BSK.transpose(1, 2)), alpha, out=out)

    def probabilities(self, q_BTK: Tensor, k_BSK: Tensor) -> Tensor:
        """Softmax of the masked scores, in buffer 1; buffer 0 is spent."""
        score_BTS = self.product(0, q_BTK, k_BSK, self.scale)
        rows = q_BTK.shape[1]
        if rows > 1:
            future = torch.ones(rows, rows, dtype=torch.bool, device=q_BTK.device).triu(1)
            score_BTS[..., -rows:].masked_fill_(future, -torch.inf)
        return torch.softmax(score_BTS, -1, out=self.view(1, q_BTK, k_BSK.shape[1]))

    def score_gradient(self, grad_BTV: Tensor, v_BSV: Tensor, p_BTS: Tensor) -> Tensor:
        """`scale · p (dp − Σ p dp)`, in buffer 2; buffer 0 is spent.

        The row's sum is taken over the probabilities themselves. Taken over the rounded output, as is usual, it would leave a bias in bf16
        that adds up over training (arXiv 2510.04212).
        """
        dp_BTS = self.product(0, grad_BTV, v_BSV, self.scale)
        out = self.view(2, grad_BTV, v_BSV.shape[1])
        return torch.ops.aten._softmax_backward_data.out(dp_BTS, p_BTS, -1, self.acc, grad_input=out)


class _CausalAttention(torch.autograd.Function):
    """Blocks of queries against the keys that they see; the backward computes the probabilities again. Saves q, k and v."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, context: Segments, scale: float) -> Tensor:
        out = v.new_empty(q.shape[0], *v.shape[1:])
        for group in _groups(segments, context):
            q_BTK, k_BSK, v_BSV = group.heads(q, keys=False), group.heads(k, keys=True), group.heads(v, keys=True)
            out_BTV = group.empty_like_heads(out, keys=False)
            scratch = _Scratch(q_BTK, group.context, scale)
            for b, t, seen in _blocks(q_BTK.shape[0], group.length, group.context):
                p_BTS = scratch.probabilities(q_BTK[b, t], k_BSK[b, :seen]).to(v.dtype)
                torch.bmm(p_BTS, v_BSV[b, :seen], out=out_BTV[b, t])
            group.put(out, out_BTV, keys=False)
        ctx.save_for_backward(q, k, v)
        ctx.segments, ctx.context, ctx.scale = segments, context, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        with exact(q):
            return *_backward(q, k, v, grad, ctx.segments, ctx.context, ctx.scale), None, None, None


def _backward(
    q: Tensor, k: Tensor, v: Tensor, grad: Tensor, segments: Segments, context: Segments, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    acc = accumulation_dtype(q)
    dq = q.new_empty(q.shape)
    dk, dv = k.new_zeros(k.shape, dtype=acc), v.new_zeros(v.shape, dtype=acc)
    for group in _groups(segments, context):
        q_BTK, k_BSK, v_BSV = group.heads(q, keys=False), group.heads(k, keys=True), group.heads(v, keys=True)
        grad_BTV, dq_BTK = group.heads(grad, keys=False), group.empty_like_heads(dq, keys=False)
        dk_BSK, dv_BSV = group.empty_like_heads(dk, keys=True).zero_(), group.empty_like_heads(dv, keys=True).zero_()
        scratch = _Scratch(q_BTK, group.context, scale)
        for b, t, seen in _blocks(q_BTK.shape[0], group.length, group.context):
            p_BTS = scratch.probabilities(q_BTK[b, t], k_BSK[b, :seen])
            _accumulate(dv_BSV[b, :seen], p_BTS.to(v.dtype).transpose(1, 2), grad_BTV[b, t])
            ds_BTS = scratch.score_gradient(grad_BTV[b, t], v_BSV[b, :seen], p_BTS).to(q.dtype)
            torch.bmm(ds_BTS, k_BSK[b, :seen], out=dq_BTK[b, t])
            _accumulate(dk_BSK[b, :seen], ds_BTS.transpose(1, 2), q_BTK[b, t])
        group.put(dq, dq_BTK, keys=False)
        group.put(dk, dk_BSK, keys=True)
        group.put(dv, dv_BSV, keys=True)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a b`, summed in total's dtype."""
    if a.dtype == total.dtype:
        total.baddbmm_(a, b)
    else:
        total.add_(torch.bmm(a, b))
