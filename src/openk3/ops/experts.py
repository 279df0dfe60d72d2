"""Routed experts: E gated MLPs of which each token visits k (Kimi K3 report §2.3).

Letters: T tokens, k chosen, E experts, L width in and out, F inner width, P rows of the sorted buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from openk3.ops.activation import GluActivation
from openk3.ops.backend import pick
from openk3.ops.mx import fake_quantize
from openk3.ops.precision import accumulation_dtype, exact

ExpertInputs = Literal["none", "mxfp8"]
"""In what format an expert's matrices read their inputs: as they come, or rounded to MXFP8 in blocks of 32."""

# An expert's rows are padded to a multiple of this. Matrix libraries compute the last rows of a product with other kernels, so without it a
# row's bits would depend on how many rows stand beside it: a packed document's numbers on its neighbours' routing. (The same holds for
# columns, so the promise needs widths that are multiples of 4.)
_ROW_TILE = 8


class Matrices(Protocol):
    """E matrices, one at a time: a stacked tensor, or something that unpacks."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, expert: int, /) -> Tensor: ...


def expert_mlp(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, activation: GluActivation, inputs: ExpertInputs = "none"
) -> Tensor:
    """`Σ_j weights_j · w2[e_j] act(w13[e_j] x)` for each token's experts `e = ids`.

    `x [T, L]`, `ids [T, k]` int64, `weights [T, k]`, `w13 [E, 2F, L]` (gate rows, then up rows), `w2 [E, L, F]` give `[T, L]`. Each
    expert's output is in `x.dtype`, the weighted sum in fp32 is cast back. Differentiable in x, weights, w13 and w2; the backward computes
    the hidden activations again. Experts without a token get zero gradients. `inputs` "mxfp8" rounds what enters each matrix, with a
    straight-through gradient.

    Raises ValueError for shapes that do not fit each other or an id outside 0…E−1.
    """
    _check(x, ids, weights, w13, w2)
    with exact(x):
        form = pick({"reference": expert_mlp_reference, "torch": _ExpertMLP.apply}, x)
        return form(_rounded(x, inputs), ids, weights, w13, w2, activation, inputs)


@torch.no_grad()
def expert_mlp_over(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Matrices, w2: Matrices, activation: GluActivation, inputs: ExpertInputs = "none"
) -> Tensor:
    """`expert_mlp` without gradients, over matrices that are fetched one expert at a time; the same code, hence the same bits."""
    _check(x, ids, weights, w13, w2)
    with exact(x):
        return _forward(_rounded(x, inputs), weights, w13, w2, _Layout.of(ids, w13.shape[0]), activation, inputs)


def _rounded(x: Tensor, inputs: ExpertInputs) -> Tensor:
    if inputs not in ("none", "mxfp8"):
        raise ValueError(f'experts read their inputs as "none" or "mxfp8", not {inputs!r}')
    return x if inputs == "none" else fake_quantize(x, "mxfp8")


def expert_mlp_reference(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, activation: GluActivation, inputs: ExpertInputs = "none"
) -> Tensor:
    """Expert by expert, over the tokens that chose it. `x` is already rounded."""
    acc = accumulation_dtype(x, weights)
    out_TL = torch.zeros(x.shape, dtype=acc, device=x.device)
    for expert in range(w13.shape[0]):
        token, slot = torch.where(ids == expert)
        gate, up = (x[token] @ w13[expert].t()).chunk(2, dim=-1)
        y = _rounded(activation(gate, up), inputs) @ w2[expert].t()
        out_TL = out_TL.index_add(0, token, y.to(acc) * weights[token, slot].to(acc)[:, None])
    return out_TL.to(x.dtype)


def _check(x: Tensor, ids: Tensor, weights: Tensor, w13: Matrices, w2: Matrices) -> None:
    experts, double_width, latent = w13.shape
    if x.shape[1:] != (latent,) or w2.shape != (experts, latent, double_width // 2) or double_width % 2:
        raise ValueError(f"tokens {tuple(x.shape)}, w13 {tuple(w13.shape)} and w2 {tuple(w2.shape)} do not fit")
    if ids.shape != weights.shape or ids.dim() != 2 or ids.shape[0] != x.shape[0]:
        raise ValueError(f"ids {tuple(ids.shape)} and weights {tuple(weights.shape)} for {x.shape[0]} tokens: both are [T, k]")
    if x.dtype != w13.dtype or x.dtype != w2.dtype:
        raise ValueError(f"tokens are {x.dtype}, w13 {w13.dtype}, w2 {w2.dtype}: they must agree")


@dataclass(frozen=True)
class _Layout:
    """Where each (token, choice) lies in a buffer sorted by expert, in token order inside an expert, padded to whole tiles."""

    rows: list[tuple[int, int, int]]
    """(expert, first row, number of tokens) of each expert that has any."""
    token_P: Tensor
    """The token that each row holds; 0 in the padding."""
    row_Tk: Tensor
    """The row of each token's j-th choice."""
    size: int
    """P."""

    @staticmethod
    def of(ids_Tk: Tensor, experts: int) -> _Layout:
        tokens, top_k = ids_Tk.shape
        flat = ids_Tk.flatten()
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < experts:
            raise ValueError(f"expert ids lie in {int(flat.min())}…{int(flat.max())}, but there are {experts} experts")
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=experts)
        # A single token has no neighbour to be independent of.
        tile = _ROW_TILE if tokens > 1 else 1
        padded = (counts + (tile - 1)).div(tile, rounding_mode="floor") * tile
        starts = padded.cumsum(0) - padded
        shift = starts - (counts.cumsum(0) - counts)
        row_of_sorted = torch.arange(flat.numel(), device=flat.device) + shift.repeat_interleave(counts)
        size = int(padded.sum())
        token_P = flat.new_zeros(size)
        token_P[row_of_sorted] = order.div(top_k, rounding_mode="floor")
        row_Tk = torch.empty_like(flat)
        row_Tk[order] = row_of_sorted
        rows = [(e, first, count) for e, (first, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)) if count]
        return _Layout(rows, token_P, row_Tk.view(tokens, top_k), size)

    def padded(self) -> list[tuple[int, slice]]:
        """(expert, its rows with the padding) of each expert that has any."""
        bounds = [first for _, first, _ in self.rows] + [self.size]
        return [(expert, slice(*bounds[at : at + 2])) for at, (expert, _, _) in enumerate(self.rows)]

    def exact(self) -> list[tuple[int, slice]]:
        """(expert, its rows without the padding) of each expert that has any."""
        return [(expert, slice(first, first + count)) for expert, first, count in self.rows]


class _ExpertMLP(torch.autograd.Function):
    """Gather by expert, one product for each expert and matrix, one activation over all, gather back with the weights."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, activation: GluActivation, inputs: ExpertInputs
    ) -> Tensor:
        layout = _Layout.of(ids, w13.shape[0])
        ctx.save_for_backward(x, weights, w13, w2, layout.token_P, layout.row_Tk)
        ctx.rows, ctx.activation, ctx.inputs = layout.rows, activation, inputs
        return _forward(x, weights, w13, w2, layout, activation, inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, w13, w2, token_P, row_Tk = ctx.saved_tensors
        layout = _Layout(ctx.rows, token_P, row_Tk, token_P.shape[0])
        with exact(x):
            return _backward(x, weights, w13, w2, layout, ctx.activation, ctx.inputs, grad, ctx.needs_input_grad)


def _forward(
    x: Tensor, weights: Tensor, w13: Matrices, w2: Matrices, layout: _Layout, activation: GluActivation, inputs: ExpertInputs
) -> Tensor:
    hidden_PF = _hidden(x.index_select(0, layout.token_P), w13, layout)
    width = w2.shape[2]
    active_PF = x.new_empty(layout.size, width)
    activation.into(hidden_PF[:, :width], hidden_PF[:, width:], active_PF)
    active_PF = _rounded(active_PF, inputs)
    y_PL = x.new_empty(layout.size, x.shape[1])
    for expert, rows in layout.padded():
        torch.mm(active_PF[rows], w2[expert].t(), out=y_PL[rows])
    return _combine(y_PL, layout.row_Tk, weights)


def _backward(
    x: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    layout: _Layout,
    activation: GluActivation,
    inputs: ExpertInputs,
    grad: Tensor,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    acc = accumulation_dtype(x, weights)
    width = w2.shape[2]
    x_PL, grad_PL = x.index_select(0, layout.token_P), grad.index_select(0, layout.token_P)
    hidden_PF = _hidden(x_PL, w13, layout)
    # Gradient of the active units before the weight: with a row's activation it also gives the gradient of its weight, y being w2 · active.
    dactive_PF = x.new_empty(layout.size, width)
    for expert, rows in layout.padded():
        torch.mm(grad_PL[rows], w2[expert], out=dactive_PF[rows])
    weight_P = weights.new_zeros(layout.size, dtype=acc).index_copy_(0, layout.row_Tk.flatten(), weights.flatten().to(acc))
    active_PF = torch.empty_like(dactive_PF)
    gate_PF, up_PF = hidden_PF[:, :width], hidden_PF[:, width:]
    weighted_PF = (dactive_PF * weight_P[:, None]).to(x.dtype)
    activation.gradients_into(weighted_PF, gate_PF, up_PF, gate_PF, up_PF, active_PF)
    active_PF = _rounded(active_PF, inputs)
    dweights = None
    if needs[2]:
        dweight_P = torch.mul(dactive_PF, active_PF, out=dactive_PF).sum(-1, dtype=acc)
        dweights = dweight_P[layout.row_Tk].to(weights.dtype)
    dw13 = dw2 = dx = None
    if needs[4]:
        active_PF.mul_(weight_P[:, None])
        dw2 = _gradient_like(w2, layout)
        for expert, rows in layout.exact():
            torch.mm(grad_PL[rows].t(), active_PF[rows], out=dw2[expert])
    if needs[3]:
        dw13 = _gradient_like(w13, layout)
        for expert, rows in layout.exact():
            torch.mm(hidden_PF[rows].t(), x_PL[rows], out=dw13[expert])
    if needs[0]:
        for expert, rows in layout.padded():
            torch.mm(hidden_PF[rows], w13[expert], out=x_PL[rows])
        dx = _combine(x_PL, layout.row_Tk, None)
    return dx, None, dweights, dw13, dw2, None, None


def _hidden(x_PL: Tensor, w13: Matrices, layout: _Layout) -> Tensor:
    hidden_PF = x_PL.new_empty(layout.size, w13.shape[1])
    for expert, rows in layout.padded():
        torch.mm(x_PL[rows], w13[expert].t(), out=hidden_PF[rows])
    return hidden_PF


def _combine(y_PL: Tensor, row_Tk: Tensor, weights: Tensor | None) -> Tensor:
    """`Σ_j weights[t, j] · y[row[t, j]]`, summed in fp32, in `y.dtype`; weights None are ones."""
    acc = accumulation_dtype(y_PL) if weights is None else accumulation_dtype(y_PL, weights)
    if y_PL.dtype == acc and row_Tk.numel():
        return F.embedding_bag(row_Tk, y_PL, mode="sum", per_sample_weights=None if weights is None else weights.to(acc))
    out_TL = torch.zeros(row_Tk.shape[0], y_PL.shape[1], dtype=acc, device=y_PL.device)
    for j in range(row_Tk.shape[1]):
        chosen = y_PL.index_select(0, row_Tk[:, j]).to(acc)
        out_TL.add_(chosen if weights is None else chosen.mul_(weights[:, j : j + 1]))
    return out_TL.to(y_PL.dtype)


def _gradient_like(weight: Tensor, layout: _Layout) -> Tensor:
    """Room for a weight's gradient: every expert that has tokens is overwritten, the others stay zero."""
    return torch.empty_like(weight) if len(layout.rows) == weight.shape[0] else torch.zeros_like(weight)
