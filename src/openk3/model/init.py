"""Starting weights. How K3 itself was initialised is not public, except AttnRes queries at zero (arXiv 2603.15031 §5) and KDA's gate scale
at exp(0) (Kimi K3 report §2.1.1); the rest is openk3's own choice and is said here, in one place."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from openk3.model.attn_res import AttnResMix
from openk3.model.kda import KDA
from openk3.model.moe import Experts, Router
from openk3.model.norm import RMSNorm
from openk3.model.precision import Projection

EMBEDDING_STD = 0.02
HEAD_STD_FACTOR = 0.5
SLOWEST_DECAY, FASTEST_DECAY = 1e-3, 1.0
"""Log decay a token at the start: channels remember from about a thousand tokens down to one."""


@torch.no_grad()
def initialise(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """Fill every parameter and buffer of `model` in module order.

    Matrices: normal, standard deviation 1/√(fan in). Embedding: normal, 0.02. Norm weights one; AttnRes queries, router biases and
    `A_log` (bounded gate) zero. KDA's `dt_bias` spreads each head's channels log-uniformly over time scales.
    """
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, EMBEDDING_STD, generator=generator)
        elif isinstance(module, Projection):
            module.weight.normal_(0.0, module.in_features**-0.5, generator=generator)
        elif isinstance(module, RMSNorm):
            module.weight.fill_(1.0)
        elif isinstance(module, AttnResMix):
            module.norm_weight.fill_(1.0)
            module.query.zero_()
        elif isinstance(module, Router):
            module.weight.normal_(0.0, module.weight.shape[1] ** -0.5, generator=generator)
            module.bias.zero_()
        elif isinstance(module, Experts):
            for weight in (module.w13, module.w2):
                weight.normal_(0.0, weight.shape[2] ** -0.5, generator=generator)
        elif isinstance(module, KDA):
            _initialise_kda(module, generator)
    head = getattr(model, "head", None)
    embed = getattr(model, "embed", None)
    if isinstance(head, Projection) and isinstance(embed, nn.Embedding) and head.weight is embed.weight:
        embed.weight.normal_(0.0, EMBEDDING_STD, generator=generator)
    elif isinstance(head, Projection):
        head.weight.mul_(HEAD_STD_FACTOR)


def _initialise_kda(layer: KDA, generator: torch.Generator | None) -> None:
    for conv in (layer.q_conv, layer.k_conv, layer.v_conv):
        bound = conv.shape[2] ** -0.5
        conv.uniform_(-bound, bound, generator=generator)
    layer.o_norm.fill_(1.0)
    decay = _log_uniform(layer.dt_bias, SLOWEST_DECAY, FASTEST_DECAY, generator)
    if layer.lower_bound is not None:
        share = (decay / abs(layer.lower_bound)).clamp_max(0.9)
        layer.A_log.zero_()
        layer.dt_bias.copy_(torch.log(share / (1.0 - share)))
    else:
        # exp(A)·softplus(dt_bias) is the decay; A spreads over heads as in Mamba 2, dt_bias makes up the rest.
        layer.A_log.uniform_(0.0, math.log(16.0), generator=generator)
        rate = decay / layer.A_log.exp().repeat_interleave(layer.head_dim)
        layer.dt_bias.copy_(rate + torch.log(-torch.expm1(-rate)))


def _log_uniform(like: Tensor, low: float, high: float, generator: torch.Generator | None) -> Tensor:
    unit = torch.empty_like(like).uniform_(generator=generator)
    return torch.exp(math.log(low) + unit * (math.log(high) - math.log(low)))
