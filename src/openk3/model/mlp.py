"""The dense gated MLP: layer 0's feed-forward, and the shared experts (one MLP of their joint width)."""

from __future__ import annotations

from torch import Tensor, nn

from openk3.config import ModelConfig
from openk3.model.precision import Projection
from openk3.ops.activation import GluActivation


def activation_of(config: ModelConfig) -> GluActivation:
    """The gated activation that `config` names: SiTU-GLU (Kimi K3 report §2.3.2) or SwiGLU."""
    if config.activation == "silu":
        return GluActivation("silu", 1.0, None)
    return GluActivation("situ", config.situ_beta or 1.0, config.situ_linear_beta)


class DenseMLP(nn.Module):
    """`down(act(gate(x), up(x)))` at hidden width D and inner width F."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.gate_proj = Projection(config.hidden_size, width)
        self.up_proj = Projection(config.hidden_size, width)
        self.down_proj = Projection(width, config.hidden_size)
        self.activation = activation_of(config)

    def forward(self, x_TD: Tensor) -> Tensor:
        """`[T, D]` to `[T, D]`."""
        return self.down_proj(self.activation(self.gate_proj(x_TD), self.up_proj(x_TD)))
