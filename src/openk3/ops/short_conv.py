"""The short causal convolution before KDA's q, k and v, with the tail that a sequence carries from call to call (Kimi K3 report §2.1.1).

Letters: T tokens, D channels, W taps, N sequences.
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

# Elements that one pass handles, so that a block is still in the cache when the next pass comes, and the fewest channels of a block.
_BLOCK = 1 << 20
_NARROWEST = 64


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
class _Lines:
    """All sequences end to end, each with its tail before its tokens: `T + N (W - 1)` rows. A sum over W rows of it never mixes sequences.

    Rows of the tokens, and for each sequence of the tail before `[N·(W - 1)]` and after the call; a slice where the rows are consecutive.
    """

    rows: int
    tokens: slice | Tensor
    before: slice | Tensor
    after: slice | Tensor

    @staticmethod
    def of(segments: Segments, past: int, device: torch.device) -> _Lines:
        total = segments.total + segments.count * past
        if segments.count == 1:
            return _Lines(total, slice(past, total), slice(0, past), slice(segments.total, total))
        gaps = past * torch.arange(segments.count)
        steps = torch.arange(past)
        tokens = torch.arange(segments.total) + past * (segments.ids + 1)
        before = (segments.offsets[:-1] + gaps)[:, None] + steps
        after = (segments.offsets[1:] + gaps)[:, None] + steps
        return _Lines(total, tokens.to(device), before.flatten().to(device), after.flatten().to(device))


def _take(x: Tensor, rows: slice | Tensor) -> Tensor:
    return x[rows] if isinstance(rows, slice) else x.index_select(0, rows)


def _put(x: Tensor, rows: slice | Tensor, values: Tensor) -> None:
    if isinstance(rows, slice):
        x[rows] = values
    else:
        x.index_copy_(0, rows, values.to(x.dtype))


class _ShortConv(torch.autograd.Function):
    """Saves x, the weight and the tail; lines and sums are made again, a block of channels at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, segments: Segments, tail: Tensor | None) -> tuple[Tensor, Tensor]:
        past = weight.shape[2] - 1
        lines = _Lines.of(segments, past, x.device)
        lags = _lags(weight, accumulation_dtype(x))
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        # Row by row in memory, as lines are: the next call reads it without a transposition.
        new_tail = x.new_empty((segments.count, past, x.shape[1])).mT
        for channels in _blocks(x):
            line = _line(x, tail, lines, channels, lags.dtype)
            new_tail[:, channels] = _take(line, lines.after).view(segments.count, past, line.shape[1]).mT
            y[:, channels] = F.silu(_take(_sums(line, lags[:, channels]), _sum_rows(lines, past)), inplace=True)
        ctx.save_for_backward(x, weight, tail)
        ctx.lines, ctx.sequences = lines, segments.count
        ctx.set_materialize_grads(False)
        return y, new_tail

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dnew_tail: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, tail = ctx.saved_tensors
        lines: _Lines = ctx.lines
        past = weight.shape[2] - 1
        lags = _lags(weight, accumulation_dtype(x))
        dx, dlags = torch.empty_like(x, memory_format=torch.contiguous_format), torch.zeros_like(lags)
        dtail = None if tail is None else tail.new_empty((ctx.sequences, past, x.shape[1])).mT
        for channels in _blocks(x):
            lag = lags[:, channels]
            line = _line(x, tail, lines, channels, lags.dtype)
            dline = torch.zeros_like(line)
            if dy is not None:
                sums, rows = _sums(line, lag), _sum_rows(lines, past)
                dtokens = torch.ops.aten.silu_backward(dy[:, channels].to(lags.dtype), _take(sums, rows))
                dsums = dtokens
                if not isinstance(rows, slice):
                    # Between the sequences lie sums that are no token's.
                    dsums = sums.zero_().index_copy_(0, rows, dtokens)
                for j in range(past + 1):
                    window = slice(past - j, past - j + dsums.shape[0])
                    dline[window].addcmul_(dsums, lag[j])
                    dlags[j, channels] = (dsums * line[window]).sum(0)
            if dnew_tail is not None:
                carried = dnew_tail[:, channels].mT.reshape(ctx.sequences * past, line.shape[1]).to(lags.dtype)
                if isinstance(lines.after, slice):
                    dline[lines.after] += carried
                else:
                    dline.index_add_(0, lines.after, carried)
            dx[:, channels] = _take(dline, lines.tokens)
            if dtail is not None:
                dtail[:, channels] = _take(dline, lines.before).view(ctx.sequences, past, line.shape[1]).mT
        return dx, dlags.flip(0).T[:, None].to(weight.dtype), None, dtail


def _line(x: Tensor, tail: Tensor | None, lines: _Lines, channels: slice, dtype: torch.dtype) -> Tensor:
    """The lines of some channels, `[rows, channels]`."""
    tokens = x[:, channels]
    line = tokens.new_empty((lines.rows, tokens.shape[1]), dtype=dtype)
    _put(line, lines.tokens, tokens)
    if tail is None:
        if isinstance(lines.before, slice):
            line[lines.before] = 0
        else:
            line.index_fill_(0, lines.before, 0)
    else:
        # A tail is what x was: it has x's precision.
        _put(line, lines.before, tail[:, channels].mT.reshape(lines.rows - x.shape[0], tokens.shape[1]).to(x.dtype))
    return line


def _sums(line: Tensor, lags: Tensor) -> Tensor:
    """The convolution's sums that end at the line's rows from W - 1 on: `[rows - (W - 1), channels]`."""
    past = lags.shape[0] - 1
    count = max(line.shape[0] - past, 0)
    total = line[past:] * lags[0]
    for j in range(1, past + 1):
        total.addcmul_(line[past - j : past - j + count], lags[j])
    return total


def _sum_rows(lines: _Lines, past: int) -> slice | Tensor:
    """Which of the sums are the tokens'."""
    return slice(None) if isinstance(lines.tokens, slice) else lines.tokens - past


def _lags(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`[D, 1, W]`, oldest tap first, to `[W, D]`, the newest first: row j multiplies the input j tokens back."""
    return weight[:, 0].to(dtype).T.flip(0).contiguous()


def _blocks(x: Tensor) -> Iterator[slice]:
    """Channels that hold about `_BLOCK` elements each, and not so few that rows become short."""
    width = max(_NARROWEST, _BLOCK // max(1, x.shape[0]))
    for first in range(0, x.shape[1], width):
        yield slice(first, min(first + width, x.shape[1]))
