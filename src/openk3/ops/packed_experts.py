"""Routed experts straight from MXFP4: the arithmetic of `ops.experts`, with each expert's matrices unpacked while they are used.

Bit-equal to `expert_mlp` on the unpacked matrices: it is the same code, and only where a matrix comes from differs.
Letters: T tokens, k chosen, E experts, L width in and out, F inner width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.ops.activation import GluActivation
from openk3.ops.experts import ExpertInputs, expert_mlp_over
from openk3.ops.mx import MXTensor


@dataclass(frozen=True)
class PackedMatrices:
    """E matrices in MXFP4, read one at a time: `matrices[e]` is `[rows, columns]` in `dtype`."""

    values: MXTensor
    """`packed [E, rows, columns/2]`, `scale [E, rows, columns/32]`."""
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """`[E, rows, columns]`."""
        return torch.Size([*self.values.packed.shape[:2], self.values.width])

    def __getitem__(self, expert: int) -> Tensor:
        one = MXTensor(self.values.format, self.values.packed[expert], self.values.scale[expert], self.values.width)
        return one.dequantize(self.dtype)


def packed_expert_mlp(
    x: Tensor, ids: Tensor, weights: Tensor, w13: MXTensor, w2: MXTensor, activation: GluActivation, inputs: ExpertInputs = "none"
) -> Tensor:
    """The weighted sum `[T, L]` of the chosen experts' outputs, without gradients.

    `x [T, L]`, `ids [T, k]`, `weights [T, k]`; `w13` and `w2` hold MXFP4 of `[E, 2F, L]` and `[E, L, F]`. `inputs` "mxfp8" rounds what
    enters each matrix to MXFP8, as in quantization-aware training. Raises ValueError for shapes that do not fit.
    """
    return expert_mlp_over(x, ids, weights, PackedMatrices(w13, x.dtype), PackedMatrices(w2, x.dtype), activation, inputs)
