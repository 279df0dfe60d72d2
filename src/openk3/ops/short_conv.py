"""The short causal convolution before KDA's q, k and v, with the tail that a sequence carries from call to call (Kimi K3 report §2.1.1).

Letters: T tokens, D channels, W taps, N sequences, B tokens at a given place in their sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import pick
from openk3.ops.precision import accumulation_dtype, exact
from openk3.ops.segments import Segments

# Elements that one pass handles, so that a block is still in the cache when the next pass over it comes.
_BLOCK = 1 << 17


def short_conv(x: Tensor, weight: Tensor, segments: Segments, tail: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution along each sequence, then SiLU: `y[t] = silu(Σ_j weight[:, 0, j] x[t - (W - 1) + j])`.

    Args:
        x: `[T, D]`.
        weight: `[D, 1, W]`.
        segments: N sequences that add up to T tokens.
        tail: `[N, D, W - 1]`, the inputs before each sequence's first token, oldest first; None for zeros.

    Returns:
        y `[T, D]` in x's dtype, summed in at least fp32, and the tail after each sequence, in x's dtype.

    Differentiable once in x, weight and tail, through both results. Raises ValueError for shapes that do not fit.
    """
    if x.dim() != 2 or weight.dim() != 3 or weight.shape[:2] != (x.shape[1], 1):
        raise ValueError(f"short_conv: x is [T, D], weight is [D, 1, W]; got {list(x.shape)} and {list(weight.shape)}")
    segments.check(x.shape[0])
    tail_shape = (segments.count, x.shape[1], weight.shape[2] - 1)
    if tail is not None and tail.shape != tail_shape:
        raise ValueError(f"short_conv: tail is [N, D, W - 1] = {list(tail_shape)}; got {list(tail.shape)}")
    return pick({"reference": short_conv_reference, "torch": _short_conv_torch}, x)(x, weight, segments, tail)


def _short_conv_torch(x: Tensor, weight: Tensor, segments: Segments, tail: Tensor | None = None) -> tuple[Tensor, Tensor]:
    differentiable = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, tail))
    if tail is not None and segments.longest == 1 and segments.total == segments.count and not differentiable:
        return _step(x, weight, tail)
    result: tuple[Tensor, Tensor] = _ShortConv.apply(x, weight, segments, tail)
    return result


def _step(x: Tensor, weight: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each sequence, without gradient: what decoding does for every token and layer."""
    line_NDW = torch.cat([tail.to(x.dtype), x[:, :, None]], dim=2)
    acc = accumulation_dtype(x)
    total = (line_NDW.to(acc) * weight[:, 0].to(acc)).sum(dim=2)
    return F.silu(total, inplace=True).to(x.dtype), line_NDW[:, :, 1:].contiguous()


def short_conv_reference(x: Tensor, weight: Tensor, segments: Segments, tail: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The convolution sequence by sequence."""
    acc = accumulation_dtype(x)
    channels, _, taps = weight.shape
    if tail is None:
        tail = x.new_zeros(segments.count, channels, taps - 1)
    outputs, tails = [x[:0]], []
    for start, length, past in zip(segments.starts, segments.lengths, tail, strict=True):
        line = torch.cat([past.to(x.dtype), x[start : start + length].T], dim=1)
        if length:
            with exact(x):
                y = F.conv1d(line[None].to(acc), weight.to(acc), groups=channels)[0]
            outputs.append(F.silu(y).T.to(x.dtype))
        tails.append(line[:, length:])
    return torch.cat(outputs), torch.stack(tails) if tails else tail.to(x.dtype)


@dataclass(frozen=True)
class _Edges:
    """Which tokens lie so near their sequence's start that they see its tail, and where a new tail's columns come from.

    `heads[p]`: (sequences, flat tokens, ascending) of the tokens at place p < W - 1. `fresh[i]`: (sequences, flat tokens) whose new tail's
    column i is one of this call's tokens. `carried[i]`: (sequences, columns of the old tail) whose new tail's column i is still an old one.
    """

    heads: tuple[tuple[Tensor, Tensor], ...]
    fresh: tuple[tuple[Tensor, Tensor], ...]
    carried: tuple[tuple[Tensor, Tensor], ...]

    def heads_in(self, place: int, first: int, end: int) -> slice:
        """Which of `heads[place]` are tokens from `first` to before `end`."""
        low, high = torch.searchsorted(self.heads[place][1], torch.tensor([first, end], device=self.heads[place][1].device)).tolist()
        return slice(low, high)


def _edges(segments: Segments, past: int, device: torch.device) -> _Edges:
    starts, ends = segments.offsets[:-1], segments.offsets[1:]
    lengths = ends - starts
    heads, fresh, carried = [], [], []
    for place in range(past):
        sequences = (lengths > place).nonzero()[:, 0]
        heads.append((sequences.to(device), (starts[sequences] + place).to(device)))
        back = past - place
        sequences = (lengths >= back).nonzero()[:, 0]
        fresh.append((sequences.to(device), (ends[sequences] - back).to(device)))
        sequences = (lengths < back).nonzero()[:, 0]
        carried.append((sequences.to(device), (lengths[sequences] + place).to(device)))
    return _Edges(tuple(heads), tuple(fresh), tuple(carried))


class _ShortConv(torch.autograd.Function):
    """Saves x, the weight and the tail; the sum before SiLU is made again, block by block."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, segments: Segments, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        edges = _edges(segments, weight.shape[2] - 1, x.device)
        lags = _lags(weight, accumulation_dtype(x))
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for first, end in _blocks(x):
            y[first:end] = F.silu(_sums(x, lags, edges, tail, first, end), inplace=True)
        new_tail = x.new_zeros((segments.count, x.shape[1], weight.shape[2] - 1))
        for column, (sequences, tokens) in enumerate(edges.fresh):
            new_tail[sequences, :, column] = x.index_select(0, tokens)
        if tail is not None:
            for column, (sequences, old) in enumerate(edges.carried):
                new_tail[sequences, :, column] = tail[sequences, :, old].to(x.dtype)
        ctx.save_for_backward(x, weight, tail)
        ctx.edges = edges
        ctx.set_materialize_grads(False)
        return y, new_tail

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dnew_tail: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, tail = ctx.saved_tensors
        edges: _Edges = ctx.edges
        acc = accumulation_dtype(x)
        lags = _lags(weight, acc)
        dx = x.new_zeros(x.shape, dtype=acc)
        dlags = torch.zeros_like(lags)
        dtail = None if tail is None else torch.zeros_like(tail, dtype=acc)
        if dy is not None:
            for first, end in _blocks(x):
                total = _sums(x, lags, edges, tail, first, end)
                gate = torch.sigmoid(total)
                dsum = total.mul_(1 - gate).add_(1).mul_(gate).mul_(dy[first:end])
                _block_backward(x, dsum, lags, edges, tail, first, dx, dlags, dtail)
        if dnew_tail is not None:
            for column, (sequences, tokens) in enumerate(edges.fresh):
                dx.index_add_(0, tokens, dnew_tail[sequences, :, column].to(acc))
            if dtail is not None:
                for column, (sequences, old) in enumerate(edges.carried):
                    dtail[sequences, :, old] += dnew_tail[sequences, :, column].to(acc)
        dweight = dlags.flip(0).T[:, None].to(weight.dtype)
        return dx.to(x.dtype), dweight, None, None if tail is None or dtail is None else dtail.to(tail.dtype)


def _block_backward(
    x: Tensor,
    dsum: Tensor,
    lags: Tensor,
    edges: _Edges,
    tail: Tensor | None,
    first: int,
    dx: Tensor,
    dlags: Tensor,
    dtail: Tensor | None,
) -> None:
    """Add what the sums of the tokens from `first` on give to the gradients; `dsum` `[rows, D]` is used up."""
    taps, end = lags.shape[0], first + dsum.shape[0]
    for lag in range(taps):
        if lag:
            # Tokens at place lag - 1 see the tail from this lag on, and no token of x any more.
            place = lag - 1
            here = edges.heads_in(place, first, end)
            sequences, tokens = edges.heads[place][0][here], edges.heads[place][1][here] - first
            if tail is not None and dtail is not None:
                grad = dsum.index_select(0, tokens)
                for further in range(lag, taps):
                    column = taps - 1 + place - further
                    dlags[further] += (grad * tail[sequences, :, column].to(dsum.dtype)).sum(0)
                    dtail[sequences, :, column] += grad * lags[further]
            dsum.index_fill_(0, tokens, 0)
        if end > lag:
            low = max(first - lag, 0)
            grad = dsum[low + lag - first :]
            dx[low : end - lag].addcmul_(grad, lags[lag])
            dlags[lag] += (grad * x[low : end - lag].to(dsum.dtype)).sum(0)


def _sums(x: Tensor, lags: Tensor, edges: _Edges, tail: Tensor | None, first: int, end: int) -> Tensor:
    """The convolution's sums of the tokens `first` to before `end`, `[end - first, D]`, in the dtype of `lags`."""
    taps = lags.shape[0]
    low = max(first - taps + 1, 0)
    wide = x[low:end].to(lags.dtype)
    total = wide[first - low :] * lags[0]
    for lag in range(1, taps):
        skip = max(lag - first, 0)
        if end - first > skip:
            total[skip:].addcmul_(wide[first + skip - lag - low : end - lag - low], lags[lag])
    for place, (all_sequences, all_tokens) in enumerate(edges.heads):
        here = edges.heads_in(place, first, end)
        sequences, tokens = all_sequences[here], all_tokens[here]
        head = x.index_select(0, tokens).to(lags.dtype) * lags[0]
        for lag in range(1, taps):
            if lag <= place:
                head.addcmul_(x.index_select(0, tokens - lag).to(lags.dtype), lags[lag])
            elif tail is not None:
                head.addcmul_(tail[sequences, :, taps - 1 + place - lag].to(lags.dtype), lags[lag])
        total.index_copy_(0, tokens - first, head)
    return total


def _lags(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`[D, 1, W]`, oldest tap first, to `[W, D]`, the newest first: row j multiplies the input j tokens back."""
    return weight[:, 0].to(dtype).T.flip(0).contiguous()


def _blocks(x: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of tokens that hold about `_BLOCK` elements each."""
    rows = max(1, _BLOCK // max(1, x.shape[1]))
    for first in range(0, x.shape[0], rows):
        yield first, min(first + rows, x.shape[0])
