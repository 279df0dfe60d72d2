"""The short causal convolution before KDA's q, k and v, with the tail that a sequence carries from call to call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from openk3.ops.segments import Segments


def short_conv_reference(x: Tensor, weight: Tensor, segments: Segments, tail: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`short_conv` sequence by sequence."""
    segments.check(x.shape[0])
    accumulate = torch.promote_types(x.dtype, torch.float32)
    channels, _, taps = weight.shape
    if tail is None:
        tail = x.new_zeros(segments.count, channels, taps - 1)
    outputs, tails = [], []
    for start, length, past in zip(segments.starts, segments.lengths, tail, strict=True):
        line = torch.cat([past.to(x.dtype), x[start : start + length].T], dim=1)
        y = F.conv1d(line[None].to(accumulate), weight.to(accumulate), groups=channels)[0] if length else line[:, :0].to(accumulate)
        outputs.append(F.silu(y).T.to(x.dtype))
        tails.append(line[:, line.shape[1] - (taps - 1) :])
    y = torch.cat(outputs) if outputs else x[:0]
    return y, torch.stack(tails) if tails else tail.to(x.dtype)


short_conv = short_conv_reference
