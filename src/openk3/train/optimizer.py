"""Which optimizer moves which parameter: Per-Head Muon for matrices between features, AdamW for the rest.

Groups are decided by what a parameter does in the model (module and attribute), never by its number of dimensions; a parameter that no rule
claims, or two do, is an error.

Public for K3: Per-Head Muon, weight decay 0.1 throughout (Kimi K3 report §2.5, §3.3). Not public, chosen here: AdamW for everything below,
its settings, and which parameters decay. The 0.2 · √max(n, m) scale (arXiv 2502.16982) makes one learning rate serve both.

* Muon: all projections of KDA and MLA but `beta_proj`, dense and shared MLPs, latent projections, routed experts.
* AdamW with decay: embedding, head, router, `beta_proj` (each row of the last three is a readout of its own, one logit, score or gate, with
  nothing to orthogonalise it against) and the short convolutions (a few taps a channel).
* AdamW without decay: norm weights, `A_log`, `dt_bias`, AttnRes queries (zero is their neutral start, not a size to shrink to).

QK-Clip (K2, arXiv 2507.20534) is left out: K3's threshold is not public, KDA normalises q and k, and it needs each head's largest logit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from openk3.errors import UserError
from openk3.model.attn_res import AttnResMix
from openk3.model.decoder import Decoder
from openk3.model.kda import KDA
from openk3.model.mla import MLA
from openk3.model.mlp import DenseMLP
from openk3.model.moe import Experts, LatentMoE, Router
from openk3.model.norm import RMSNorm
from openk3.train.muon import BlockLayout, Muon
from openk3.train.optimizer_settings import OptimizerConfig as OptimizerConfig

MUON, DECAYED, PLAIN, FROZEN = "muon", "adamw_decayed", "adamw_plain", "frozen"
_WHOLE = "whole"
_NORM_PIECE = 1 << 15
_Rule = BlockLayout | str


class Optimizer:
    """Muon and AdamW over one model. Build with `build_optimizer`."""

    def __init__(
        self, config: OptimizerConfig, groups: Mapping[str, Mapping[str, nn.Parameter]], layouts: Mapping[str, BlockLayout]
    ) -> None:
        self.config = config
        self.groups: dict[str, tuple[str, ...]] = {group: tuple(members) for group, members in groups.items()}
        """Names of the parameters in `muon`, `adamw_decayed`, `adamw_plain` and `frozen` (those that need no gradient)."""
        self._parameters = {name: parameter for members in groups.values() for name, parameter in members.items()}
        self._muon = Muon(
            {name: (self._parameters[name], layouts[name]) for name in self.groups[MUON]},
            momentum=config.momentum,
            steps=config.newton_schulz_steps,
            update_rms=config.update_rms,
            rms_shape=config.rms_shape,
            precision=config.newton_schulz_precision,
        )
        names = self.groups[DECAYED] + self.groups[PLAIN]
        self._mean = {name: torch.zeros_like(self._parameters[name], requires_grad=False) for name in names}
        self._square = {name: torch.zeros_like(self._parameters[name], requires_grad=False) for name in names}
        self._steps = {name: torch.zeros((), dtype=torch.float32, device=self._parameters[name].device) for name in names}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Every parameter that this optimizer moves."""
        frozen = set(self.groups[FROZEN])
        return [parameter for name, parameter in self._parameters.items() if name not in frozen]

    def step(self, lr_scale: float = 1.0) -> None:
        """Move every parameter that has a gradient, at `lr_scale` times the configured learning rate."""
        lr = self.config.lr * lr_scale
        self._muon.step(lr, self.config.weight_decay)
        self._adamw(self.groups[DECAYED], lr, self.config.weight_decay)
        self._adamw(self.groups[PLAIN], lr, 0.0)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """The state by kind and parameter name; the tensors are the live ones, not copies."""
        return {kind: dict(tensors) for kind, tensors in self._state().items()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy `state` in. Raises UserError, before anything changes, for a missing, unexpected or differently shaped entry."""
        own = {f"{kind} of {name}": tensor for kind, tensors in self._state().items() for name, tensor in tensors.items()}
        given = {f"{kind} of {name}": tensor for kind, tensors in state.items() for name, tensor in tensors.items()}
        for what, names in (("lacks", own.keys() - given.keys()), ("holds an unknown", given.keys() - own.keys())):
            if names:
                raise UserError(f"the optimizer state {what} {min(names)} (and {len(names) - 1} more): it is of another model or optimizer")
        for name, tensor in own.items():
            if given[name].shape != tensor.shape or given[name].dtype != tensor.dtype:
                shapes = f"{given[name].dtype} {list(given[name].shape)}, not {tensor.dtype} {list(tensor.shape)}"
                raise UserError(f"the optimizer state's {name} is {shapes}: it is of another model")
        for name, tensor in own.items():
            tensor.copy_(given[name])

    def _state(self) -> dict[str, dict[str, Tensor]]:
        return {"momentum": self._muon.buffers, "mean": self._mean, "square": self._square, "steps": self._steps}

    @torch.no_grad()
    def _adamw(self, names: Iterable[str], lr: float, weight_decay: float) -> None:
        moved = [name for name in names if self._parameters[name].grad is not None]
        if not moved:
            return
        adamw(
            [self._parameters[name] for name in moved],
            [grad for name in moved if (grad := self._parameters[name].grad) is not None],
            [self._mean[name] for name in moved],
            [self._square[name] for name in moved],
            [],
            [self._steps[name] for name in moved],
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=self.config.eps,
        )


def build_optimizer(model: nn.Module, config: OptimizerConfig | None = None) -> Optimizer:
    """The optimizer of `model`, with every parameter in exactly one group.

    Raises ValueError when a parameter is claimed by no rule or by two, or is narrower than fp32 (train fp32 weights, under autocast).
    """
    config = config or OptimizerConfig()
    parameters = dict(model.named_parameters())
    rules = _claimed(model, parameters, config.per_head)
    groups: dict[str, dict[str, nn.Parameter]] = {group: {} for group in (MUON, DECAYED, PLAIN, FROZEN)}
    layouts: dict[str, BlockLayout] = {}
    for name, parameter in parameters.items():
        rule = rules[name]
        if not parameter.requires_grad:
            groups[FROZEN][name] = parameter
            continue
        if torch.finfo(parameter.dtype).bits < 32:
            raise ValueError(f"{name} is {parameter.dtype}: train fp32 weights and let autocast narrow the arithmetic")
        if rule in (DECAYED, PLAIN):
            groups[str(rule)][name] = parameter
        elif config.kind == "adamw":
            groups[DECAYED][name] = parameter
        else:
            groups[MUON][name] = parameter
            layouts[name] = rule if isinstance(rule, BlockLayout) else BlockLayout.whole(parameter)
    assert sorted(name for members in groups.values() for name in members) == sorted(parameters)
    return Optimizer(config, groups, layouts)


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scale all gradients so that their joint 2-norm is at most `max_norm`; return the norm that they had.

    A norm that is not finite is returned as such, and the gradients stay as they are. `max_norm` inf only measures.
    """
    if not max_norm > 0.0:
        raise ValueError(f"max_norm is above 0, not {max_norm}")
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return 0.0
    # In pieces: a running sum of millions of squares in fp32 loses its low digits, 0.2 % at 4 M elements.
    pieces = [piece for gradient in gradients for piece in gradient.reshape(-1).split(_NORM_PIECE)]
    norm = float(torch.stack(torch._foreach_norm(pieces)).double().square().sum().sqrt())
    if math.isfinite(norm) and norm > max_norm:
        torch._foreach_mul_(gradients, max_norm / norm)
    return norm


def _claimed(model: nn.Module, parameters: Mapping[str, nn.Parameter], per_head: bool) -> dict[str, _Rule]:
    claims: dict[str, list[_Rule]] = {name: [] for name in parameters}
    for prefix, module in model.named_modules():
        for local, rule in _rules(module, per_head).items():
            # Absent parts (None) and the second name of a tied weight are not among the parameters.
            if (name := f"{prefix}.{local}" if prefix else local) in claims:
                claims[name].append(rule)
    for name, rules in claims.items():
        if len(rules) != 1:
            raise ValueError(f"{name} is claimed by {len(rules)} rules of the optimizer; each parameter belongs to exactly one group")
    return {name: rules[0] for name, rules in claims.items()}


def _rules(module: nn.Module, per_head: bool) -> dict[str, _Rule]:
    """What moves the parameters of `module`, by name below it: Muon on these blocks or on the `whole`, or a group of AdamW."""
    if isinstance(module, KDA):
        heads: _Rule = BlockLayout(module.heads, (module.head_dim,)) if per_head else _WHOLE
        return {
            **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight"), heads),
            **{f"{part}.weight": _WHOLE for part in ("f_down", "f_up", "g_proj", "g_down", "g_up", "o_proj")},
            **dict.fromkeys(("q_conv", "k_conv", "v_conv", "beta_proj.weight"), DECAYED),
            **dict.fromkeys(("A_log", "dt_bias", "o_norm"), PLAIN),
        }
    if isinstance(module, MLA):
        query: _Rule = BlockLayout(module.heads, (module.own + module.shared,)) if per_head else _WHOLE
        # kv_up stacks a head's key rows on its value rows: W_K and W_V, two blocks a head.
        key_value: _Rule = BlockLayout(module.heads, (module.own, module.value)) if per_head else _WHOLE
        return {
            **dict.fromkeys(("q_proj.weight", "q_up.weight"), query),
            "kv_up.weight": key_value,
            **{f"{part}.weight": _WHOLE for part in ("q_down", "kv_down", "g_proj", "o_proj")},
        }
    if isinstance(module, DenseMLP):
        return {f"{part}.weight": _WHOLE for part in ("gate_proj", "up_proj", "down_proj")}
    if isinstance(module, LatentMoE):
        return {"latent_down.weight": _WHOLE, "latent_up.weight": _WHOLE}
    if isinstance(module, Experts):
        count, rows, _ = module.w13.shape
        return {"w13": BlockLayout(count, (rows // 2, rows // 2)), "w2": BlockLayout(count, (module.w2.shape[1],))}
    if isinstance(module, Decoder):
        return {"embed.weight": DECAYED, "head.weight": DECAYED}
    if isinstance(module, Router):
        return {"weight": DECAYED}
    if isinstance(module, RMSNorm):
        return {"weight": PLAIN}
    if isinstance(module, AttnResMix):
        return {"norm_weight": PLAIN, "query": PLAIN}
    return {}
