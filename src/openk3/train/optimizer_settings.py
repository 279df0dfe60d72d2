"""Settings of the optimizer. Apart from it, so that reading settings does not wait for torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from openk3.errors import UserError

Precision = Literal["auto", "float32", "bfloat16"]
RmsShape = Literal["block", "matrix"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How parameters move. Learning rates are peaks: a schedule's factor multiplies them at each step."""

    kind: Literal["muon", "adamw"] = "muon"
    """`adamw` moves the matrices by AdamW with decay, too."""
    lr: float = 3e-3
    weight_decay: float = 0.1
    """Decoupled: each step takes lr · weight_decay of a weight away."""
    per_head: bool = True
    """Orthogonalise query, key and value momenta head by head; False takes each projection as one matrix."""
    momentum: float = 0.95
    """Muon's, Nesterov."""
    newton_schulz_steps: int = 5
    newton_schulz_precision: Precision = "auto"
    """`auto`: bfloat16 where the device multiplies bfloat16 matrices in hardware."""
    update_rms: float = 0.2
    """Root mean square of a Muon update in units of the learning rate."""
    rms_shape: RmsShape = "block"
    """Whether that holds for each orthogonalised block, or for one of the whole matrix's shape."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8

    def __post_init__(self) -> None:
        checks = {
            "kind": self.kind in ("muon", "adamw"),
            "lr": 0.0 < self.lr < math.inf,
            "weight_decay": 0.0 <= self.weight_decay < math.inf,
            "momentum": 0.0 <= self.momentum < 1.0,
            "newton_schulz_steps": self.newton_schulz_steps >= 1,
            "newton_schulz_precision": self.newton_schulz_precision in ("auto", "float32", "bfloat16"),
            "update_rms": 0.0 < self.update_rms < math.inf,
            "rms_shape": self.rms_shape in ("block", "matrix"),
            "beta1": 0.0 <= self.beta1 < 1.0,
            "beta2": 0.0 <= self.beta2 < 1.0,
            "eps": 0.0 < self.eps < math.inf,
        }
        for name, valid in checks.items():
            if not valid:
                raise UserError(f"optimizer.{name} = {getattr(self, name)!r} is out of range")
