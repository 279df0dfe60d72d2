"""Softmax attention over ragged sequences: expanded heads, and absorbed over latents (Kimi K3 report §2.1.2).

Letters: T new tokens, S keys, H heads, N sequences, R latent rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from openk3.ops.precision import accumulation_dtype, exact
from openk3.ops.segments import Segments


def causal_attention_reference(q: Tensor, k: Tensor, v: Tensor, segments: Segments, context: Segments, scale: float) -> Tensor:
    """Sequence by sequence: `softmax(q kᵀ · scale, causal) v`, softmax in fp32, probabilities cast to the model's dtype."""
    outputs = []
    acc = accumulation_dtype(q)
    with exact(q):
        for start, length, key_start, key_length in zip(segments.starts, segments.lengths, context.starts, context.lengths, strict=True):
            q_HTK = q[start : start + length].transpose(0, 1)
            k_HSK = k[key_start : key_start + key_length].transpose(0, 1)
            v_HSV = v[key_start : key_start + key_length].transpose(0, 1)
            score = (q_HTK @ k_HSK.transpose(1, 2)).to(acc) * scale
            seen = torch.ones(length, key_length, dtype=torch.bool, device=q.device).tril(key_length - length)
            p_HTS = torch.softmax(score.masked_fill(~seen, -torch.inf), -1).to(v.dtype)
            outputs.append((p_HTS @ v_HSV).transpose(0, 1))
    return torch.cat(outputs) if outputs else v.new_zeros(0, *v.shape[1:])


def causal_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, context: Segments, scale: float) -> Tensor:
    """Causal attention `[T, H, Dv]` of new tokens `q [T, H, Dk]` over `k [S, H, Dk]`, `v [S, H, Dv]`.

    Sequence n has `segments.lengths[n]` new tokens, which are the last of its `context.lengths[n]` keys.
    """
    return causal_attention_reference(q, k, v, segments, context, scale)


def absorbed_attention(q: Tensor, latents: Sequence[Tensor], segments: Segments, rank: int, scale: float) -> Tensor:
    """Attention `[T, H, R]` of `q [T, H, R + r]` over each sequence's `latents[n] [S_n, R + r]`, shared by all heads.

    The value of a latent is its first `rank` numbers. Sequence n's new tokens are the last of its latents, causal among themselves.
    """
    acc = accumulation_dtype(q)
    outputs = []
    with exact(q):
        for start, length, latent in zip(segments.starts, segments.lengths, latents, strict=True):
            keys = latent.shape[0]
            score = (q[start : start + length] @ latent.t()).to(acc) * scale
            seen = torch.ones(length, keys, dtype=torch.bool, device=q.device).tril(keys - length)
            p_THS = torch.softmax(score.masked_fill(~seen[:, None], -torch.inf), -1).to(q.dtype)
            outputs.append(p_THS @ latent[:, :rank])
    return torch.cat(outputs) if outputs else q.new_zeros(0, q.shape[1], rank)
