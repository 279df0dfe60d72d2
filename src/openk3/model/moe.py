"""Stable LatentMoE: few of many experts, in a latent half as wide, normalised after aggregation (Kimi K3 report §2.3).

Without a latent it is the plain MoE of Kimi Linear (arXiv 2510.26692). Letters: T tokens, D hidden, E experts, L latent, F expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openk3.config import ModelConfig
from openk3.model.mlp import DenseMLP, activation_of
from openk3.model.norm import RMSNorm
from openk3.model.packed_experts import PackedExperts
from openk3.model.precision import IslandModule, Projection, accumulation_dtype, narrowed
from openk3.model.routing_log import RoutingLog
from openk3.model.trace import Trace
from openk3.ops.activation import GluActivation
from openk3.ops.experts import ExpertInputs, expert_mlp
from openk3.ops.mx import ScaleRule, fake_quantize
from openk3.ops.routing import Selection, route


class Router(IslandModule):
    """Scores experts on the full-width hidden state; `bias` steers selection only and is set by balancing, not by gradients."""

    islands = ("bias",)
    bias: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("bias", torch.zeros(config.num_experts, dtype=accumulation_dtype(torch.get_default_dtype())))

    def forward(self, x_TD: Tensor, ids_Tk: Tensor | None = None) -> Selection:
        """Select `experts_per_token` experts for each token, or weigh the given ones."""
        config = self.config
        return route(
            x_TD,
            self.weight,
            self.bias,
            config.experts_per_token,
            activation=config.router_activation,
            renormalize=config.renormalize,
            scale=config.routed_scaling_factor,
            groups=config.num_expert_groups,
            topk_groups=config.topk_groups,
            ids=ids_Tk,
        )


class Experts(nn.Module):
    """E gated MLPs of width F on inputs of width L, stacked: `w13 [E, 2F, L]` (gate rows, then up rows) and `w2 [E, L, F]`.

    With `weight_rule` set (quantization-aware training) the forward pass sees the weights rounded to MXFP4 by that scale rule, and
    gradients reach the masters as if nothing had been rounded; `inputs` "mxfp8" rounds what enters each matrix.
    """

    def __init__(self, count: int, width_in: int, width: int, activation: GluActivation) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(count, 2 * width, width_in))
        self.w2 = nn.Parameter(torch.empty(count, width_in, width))
        self.activation = activation
        self.inputs: ExpertInputs = "none"
        self.weight_rule: ScaleRule | None = None

    def forward(self, x_TL: Tensor, ids_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """The weighted sum of the chosen experts' outputs, `[T, L]`."""
        # Under autocast the input is narrower than the master weights, also where no latent projection has narrowed it.
        x_TL = narrowed(x_TL)
        w13, w2 = (self._seen(weight).to(x_TL.dtype) for weight in (self.w13, self.w2))
        return expert_mlp(x_TL, ids_Tk, weights_Tk, w13, w2, self.activation, self.inputs)

    def _seen(self, weight: Tensor) -> Tensor:
        return weight if self.weight_rule is None else fake_quantize(weight, "mxfp4", self.weight_rule)


class LatentMoE(nn.Module):
    """`shared(x) + up(norm(Σ wₑ · expertₑ(down(x))))`; `down`, `norm` and `up` only where the config has a latent."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.layer = layer
        latent = config.latent_size
        self.router = Router(config)
        self.latent_down = Projection(config.hidden_size, latent) if latent else None
        self.latent_norm = RMSNorm(latent, config.rms_norm_eps) if latent and config.latent_norm else None
        self.latent_up = Projection(latent, config.hidden_size) if latent else None
        self.experts: Experts | PackedExperts = Experts(
            config.num_experts, latent or config.hidden_size, config.moe_intermediate_size, activation_of(config)
        )
        shared_width = config.moe_intermediate_size * config.num_shared_experts
        self.shared = DenseMLP(config, shared_width) if shared_width else None

    def forward(self, x_TD: Tensor, routing: RoutingLog | None = None, trace: Trace | None = None) -> Tensor:
        """`[T, D]` to `[T, D]`. `routing` records this layer's choice, or dictates it when it already holds one."""
        replayed = None if routing is None else routing.replay(self.layer)
        selection = self.router(x_TD, replayed)
        if routing is not None and replayed is None:
            routing.record(self.layer, selection)
        if trace is not None:
            trace.note("routing", f"layer.{self.layer}", lambda: selection.ids)
        z_TL = x_TD if self.latent_down is None else self.latent_down(x_TD)
        y_TL = self.experts(z_TL, selection.ids, selection.weights)
        if self.latent_norm is not None:
            y_TL = self.latent_norm(y_TL)
        y_TD = y_TL if self.latent_up is None else self.latent_up(y_TL)
        return y_TD if self.shared is None else y_TD + self.shared(x_TD)
