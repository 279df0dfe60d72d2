"""Routed experts as the release stores them: MXFP4 codes and block scales, unpacked one expert at a time while it is used."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openk3.ops.activation import GluActivation
from openk3.ops.experts import ExpertInputs
from openk3.ops.mx import BLOCK, MXTensor
from openk3.ops.packed_experts import packed_expert_mlp


class PackedExperts(nn.Module):
    """E gated MLPs of width F on inputs of width L in MXFP4, for inference.

    `w13_packed [E, 2F, L/2]`, `w13_scale [E, 2F, L/32]`, `w2_packed [E, L, F/2]`, `w2_scale [E, L, F/32]`, all uint8.
    """

    w13_packed: Tensor
    w13_scale: Tensor
    w2_packed: Tensor
    w2_scale: Tensor

    def __init__(self, count: int, width_in: int, width: int, activation: GluActivation, inputs: ExpertInputs = "none") -> None:
        super().__init__()
        for name, rows, columns in (("w13", 2 * width, width_in), ("w2", width_in, width)):
            if columns % BLOCK:
                raise ValueError(f"{name} has {columns} columns; packed matrices have blocks of {BLOCK}")
            self.register_buffer(f"{name}_packed", torch.empty(count, rows, columns // 2, dtype=torch.uint8))
            self.register_buffer(f"{name}_scale", torch.empty(count, rows, columns // BLOCK, dtype=torch.uint8))
        self.activation = activation
        self.inputs: ExpertInputs = inputs

    def forward(self, x_TL: Tensor, ids_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """The weighted sum of the chosen experts' outputs, `[T, L]`."""
        w13 = MXTensor("mxfp4", self.w13_packed, self.w13_scale, self.w13_packed.shape[2] * 2)
        w2 = MXTensor("mxfp4", self.w2_packed, self.w2_scale, self.w2_packed.shape[2] * 2)
        return packed_expert_mlp(x_TL, ids_Tk, weights_Tk, w13, w2, self.activation, self.inputs)

    def extra_repr(self) -> str:
        return f"{self.w13_packed.shape[0]} experts, MXFP4, inputs {self.inputs}"
