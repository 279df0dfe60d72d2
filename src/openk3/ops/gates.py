"""KDA's decay gate, its l2 normalisation and its gated output norm (Kimi K3 report §2.1.1, eq. 2, 5 and 6).

Each fast form works on a block of tokens at a time, which stays in the cache from one pass to the next, and its backward recomputes: only
inputs are saved. Letters: T tokens, H heads, K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.backend import pick
from openk3.ops.precision import accumulation_dtype

# Elements that one pass handles.
_BLOCK = 1 << 19
# exp(A_log) is held below exp(60), so that its product with any f, and with the slope of a bounded gate, stays within fp32.
_LARGEST_LOG_RATE = 60.0


def kda_gate(f: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """KDA's log decay `g [T, H, K]` in nats, at least fp32.

    With a lower bound (Kimi K3): `g = lower_bound · sigmoid(exp(A_log) (f + dt_bias))`, in [lower_bound, 0]. Without (Kimi Linear):
    `g = -exp(A_log) · softplus(f + dt_bias)`, with torch's softplus (linear above 20).

    Args:
        f: `[T, H, K]`, the decay projection's output.
        A_log: `[H]`.
        dt_bias: `[H·K]`.
        lower_bound: negative, or None.

    The gradient is finite however far the gate is saturated. Raises ValueError for shapes that do not fit, or a bound that is not negative.
    """
    if f.dim() != 3 or A_log.shape != f.shape[1:2] or dt_bias.numel() != f.shape[1] * f.shape[2]:
        shapes = f"{list(f.shape)}, {list(A_log.shape)} and {list(dt_bias.shape)}"
        raise ValueError(f"kda_gate: f is [T, H, K], A_log [H], dt_bias [H·K]; got {shapes}")
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"kda_gate: the lower bound of a log decay is negative; got {lower_bound}")
    return pick({"reference": kda_gate_reference, "torch": _Gate.apply}, f)(f, A_log, dt_bias, lower_bound)


def kda_gate_reference(f: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """The gate as the formula has it."""
    acc = accumulation_dtype(f)
    rate = A_log.to(acc).exp()[:, None]
    z = f.to(acc) + dt_bias.to(acc).view(f.shape[1:])
    return -rate * F.softplus(z) if lower_bound is None else lower_bound * torch.sigmoid(rate * z)


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / sqrt(Σ x² + eps)` over the last axis, computed in at least fp32, in x's dtype."""
    return pick({"reference": l2norm_reference, "torch": _L2Norm.apply}, x)(x, eps)


def l2norm_reference(x: Tensor, eps: float = 1e-6) -> Tensor:
    """The l2 normalisation as the formula has it."""
    wide = x.to(accumulation_dtype(x))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def gated_rms_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """`x · rsqrt(mean(x²) + eps) · weight · sigmoid(gate)`, all in at least fp32, cast once, to gate's dtype.

    x and gate are `[T, H, V]`, weight is `[V]`, shared by the heads. Raises ValueError for shapes that do not fit.
    """
    if x.shape != gate.shape or weight.shape != x.shape[-1:]:
        shapes = f"{list(x.shape)}, {list(weight.shape)} and {list(gate.shape)}"
        raise ValueError(f"gated_rms_norm: x and gate are [T, H, V], weight is [V]; got {shapes}")
    return pick({"reference": gated_rms_norm_reference, "torch": _GatedRMSNorm.apply}, x)(x, weight, gate, eps)


def gated_rms_norm_reference(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """The gated norm as the formula has it."""
    acc = accumulation_dtype(x, gate)
    wide = x.to(acc)
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normal * weight.to(acc) * torch.sigmoid(gate.to(acc))).to(gate.dtype)


class _Gate(torch.autograd.Function):
    """Saves f and the result, which the op that takes it saves in any case."""

    @staticmethod
    def forward(ctx: Any, f: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
        acc = accumulation_dtype(f)
        rate, bias = _rate(A_log, acc), dt_bias.to(acc).view(f.shape[1:])
        g = f.new_empty(f.shape, dtype=acc)
        for rows in _blocks(f):
            z = torch.add(f[rows], bias, out=g[rows])
            if lower_bound is None:
                torch.mul(F.softplus(z), -rate, out=z)
            else:
                z.mul_(rate).sigmoid_().mul_(lower_bound)
        ctx.save_for_backward(f, A_log, dt_bias, g)
        ctx.lower_bound = lower_bound
        return g

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dg: Tensor) -> tuple[Tensor | None, ...]:
        f, A_log, dt_bias, g = ctx.saved_tensors
        bound: float | None = ctx.lower_bound
        rate, bias = _rate(A_log, g.dtype), dt_bias.to(g.dtype).view(f.shape[1:])
        # Gradients of z = f + dt_bias are `slope` times those of softplus(z), or of u = exp(A_log) z within the sigmoid.
        slope = -rate if bound is None else bound * rate
        df = torch.empty_like(f)
        dA, dz_sum = torch.zeros_like(bias), torch.zeros_like(bias)
        for rows in _blocks(f):
            z = f[rows] + bias
            if bound is None:
                dA += (g[rows] * dg[rows]).sum(0)
                dz = torch.ops.aten.softplus_backward(dg[rows], z, 1.0, 20.0)
            else:
                dz = torch.ops.aten.sigmoid_backward(dg[rows], g[rows] / bound)
                dA += z.mul_(dz).sum(0).mul_(slope)
            dz_sum += dz.sum(0)
            _multiply(dz, slope, df[rows])
        return df, dA.sum(1).to(A_log.dtype), (dz_sum * slope).view(dt_bias.shape).to(dt_bias.dtype), None


class _L2Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        acc = accumulation_dtype(x)
        y = torch.empty_like(x)
        for rows in _blocks(x):
            wide = x[rows].to(acc)
            _multiply(wide, _inverse_length(wide, eps), y[rows])
        ctx.save_for_backward(x)
        ctx.eps = eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        acc = accumulation_dtype(x)
        dx = torch.empty_like(x)
        for rows in _blocks(x):
            wide, grad = x[rows].to(acc), dy[rows].to(acc)
            inverse = _inverse_length(wide, ctx.eps)
            along = (wide * grad).sum(-1, keepdim=True).mul_(inverse.square()).neg_()
            # dx = (dy - y (y·dy)) / length
            _multiply(torch.addcmul(grad, wide, along), inverse, dx[rows])
        return dx, None


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        acc = accumulation_dtype(x, gate)
        scale = weight.to(acc)
        y = torch.empty_like(gate)
        for rows in _blocks(x):
            wide = x[rows].to(acc)
            inverse = _inverse_length(wide, eps * x.shape[-1]).mul_(x.shape[-1] ** 0.5)
            _multiply(torch.sigmoid(gate[rows].to(acc)).mul_(wide).mul_(inverse), scale, y[rows])
        ctx.save_for_backward(x, weight, gate)
        ctx.eps = eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, gate = ctx.saved_tensors
        acc, width = accumulation_dtype(x, gate), x.shape[-1]
        scale = weight.to(acc)
        dx, dgate, dweight = torch.empty_like(x), torch.empty_like(gate), torch.zeros_like(scale)
        for rows in _blocks(x):
            wide, grad = x[rows].to(acc), dy[rows].to(acc)
            inverse = _inverse_length(wide, ctx.eps * width).mul_(width**0.5)
            opened = torch.sigmoid(gate[rows].to(acc))
            normal = wide * inverse
            # dy times the normalised x: what weight and gate see.
            product = grad * normal
            dweight += torch.mul(product, opened).flatten(0, -2).sum(0)
            product.mul_(scale)
            dgate[rows] = torch.ops.aten.sigmoid_backward(product, opened)
            along = product.mul_(opened).mean(-1, keepdim=True).neg_()
            dnormal = opened.mul_(grad).mul_(scale)
            _multiply(dnormal.addcmul_(normal, along), inverse, dx[rows])
        return dx, dweight.to(weight.dtype), dgate, None


def _multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """`out = a · b`, rounded once to out's dtype."""
    if out.dtype == a.dtype:
        torch.mul(a, b, out=out)
    else:
        out.copy_(a * b)


def _rate(A_log: Tensor, acc: torch.dtype) -> Tensor:
    """exp(A_log) as `[H, 1]`."""
    return A_log.to(acc).clamp(max=_LARGEST_LOG_RATE).exp()[:, None]


def _inverse_length(x: Tensor, eps: float) -> Tensor:
    """`1 / sqrt(Σ x² + eps)` over the last axis, which is kept."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(eps).rsqrt_()


def _blocks(x: Tensor) -> Iterator[slice]:
    """Slices of the first axis that hold about `_BLOCK` elements each."""
    rows = max(1, _BLOCK * x.shape[0] // max(1, x.numel()))
    for first in range(0, x.shape[0], rows):
        yield slice(first, first + rows)
