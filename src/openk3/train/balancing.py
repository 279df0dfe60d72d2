"""Keeps experts equally loaded by moving each router's selection bias between steps: no auxiliary loss, no gradient.

`quantile` (Kimi K3 report §2.3.3, App. C, D): with m tokens in the step, n experts and k chosen, each expert should get q = mk/n tokens.
Token i would just take expert j at the bias rᵢⱼ = αᵢ − sᵢⱼ (αᵢ its (k+1)-th biased score, sᵢⱼ the unbiased one), so the next bias of
j is the value below which q of its m needs rᵢⱼ lie, less the mean over experts. Needs are gathered in a histogram on
[b_min − 1, b_max + 1], which holds all of them, since scores are in [0, 1].
`sign` (DeepSeek-V3, arXiv 2412.19437): a fixed step up for experts below the mean load, down above it. `none` only measures.

A step may consist of many forward passes: each shows its selections to `observe`, then one `update` ends the step. Counts and histograms
are int64 tensors that add up over processes. Whatever is not observed (evaluation, generation, a recomputed layer) changes nothing.

Letters: T tokens, E experts, k chosen, B bins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from openk3.errors import UserError
from openk3.model.decoder import Decoder
from openk3.model.moe import Router
from openk3.ops.routing import Selection

Rule = Literal["quantile", "sign", "none"]
_CHUNK = 1 << 22


@dataclass(frozen=True)
class LayerBalance:
    """How one layer's tokens spread over its experts in one step."""

    max_violation: float
    """The largest load over the mean load, minus 1; 0 is perfect."""
    utilisation: float
    """The share of experts that got any token."""
    load: Tensor
    """Tokens of each expert, int64 `[E]`."""


@dataclass(frozen=True)
class BalanceMetrics:
    """The balance of one step, by layer index; empty when no layer routed a token."""

    layers: dict[int, LayerBalance]

    @property
    def max_violation(self) -> float:
        """Of the worst layer."""
        return max((layer.max_violation for layer in self.layers.values()), default=0.0)

    @property
    def mean_violation(self) -> float:
        """The mean over layers of their max-violation."""
        return sum(layer.max_violation for layer in self.layers.values()) / max(1, len(self.layers))

    @property
    def utilisation(self) -> float:
        """Of the worst layer."""
        return min((layer.utilisation for layer in self.layers.values()), default=1.0)


def quantile_bias_reference(scores_TE: Tensor, cutoff_T: Tensor, top_k: int) -> Tensor:
    """The next bias `[E]` of the `quantile` rule without a histogram, from a whole step's unbiased scores and biased cutoffs.

    Margins are sᵢⱼ − αᵢ; the bias is minus the (q+1)-th largest of an expert's, a fractional q interpolating between neighbours.
    """
    tokens, experts = scores_TE.shape
    margins_TE = (scores_TE - cutoff_T[:, None]).sort(0, descending=True).values
    q = tokens * top_k / experts
    lower = int(q)
    bias = -torch.lerp(margins_TE[lower], margins_TE[min(lower + 1, tokens - 1)], q - lower)
    return bias - bias.mean()


class Observation:
    """What one layer's router did, under one `bias [E]`, since the last update.

    `counts [E]` and, for quantiles, `histogram [E, B]`: int64, may be summed over processes before the update.
    """

    def __init__(self, bias: Tensor, bins: int) -> None:
        experts = bias.numel()
        self.bias, self.bins = bias, bins
        self.counts = torch.zeros(experts, dtype=torch.int64, device=bias.device)
        self.histogram = torch.zeros(experts, bins, dtype=torch.int64, device=bias.device)

    def add(self, selection: Selection) -> None:
        """Count the tokens, and the needs, of one forward pass."""
        experts = self.counts.numel()
        self.counts += torch.bincount(selection.ids.flatten(), minlength=experts)
        if not self.bins:
            return
        if selection.cutoff is None:
            raise ValueError("a replayed selection has no cutoff: only free routing can be balanced by quantiles")
        low, width = self._range()
        first_bin = torch.arange(experts, dtype=torch.int32, device=self.counts.device)[:, None] * self.bins
        rows = max(1, _CHUNK // experts)
        for scores_TE, cutoff_T in zip(selection.scores.split(rows), selection.cutoff.split(rows), strict=True):
            # Expert by expert, so that counting stays within one expert's row of bins.
            needs_ET = ((cutoff_T - low)[:, None] - scores_TE).t().contiguous()
            place_ET = needs_ET.div_(width).to(torch.int32)
            # Clamped as integers: a NaN or −inf, which training stops on elsewhere, must not become an address.
            place_ET = place_ET.clamp_(0, self.bins - 1).add_(first_bin)
            self.histogram += torch.bincount(place_ET.flatten(), minlength=self.histogram.numel()).view_as(self.histogram)

    def quantile(self, rank: float) -> Tensor:
        """For each expert the value that `rank` of its needs lie below, interpolated within its bin: float64 `[E]`."""
        cumulative = self.histogram.cumsum(1)
        place = (cumulative > rank).to(torch.int32).argmax(1, keepdim=True)
        inside = self.histogram.gather(1, place)
        before = cumulative.gather(1, place) - inside
        low, width = self._range()
        return low.double() + width.double() * (place + (rank - before.double()) / inside)[:, 0]

    def _range(self) -> tuple[Tensor, Tensor]:
        """The histogram's lower end and the width of a bin."""
        low = self.bias.min() - 1.0
        return low, (self.bias.max() + 1.0 - low) / self.bins


class Balancer:
    """The routers of `model` and the rule that sets their biases.

    `bins` of the histograms; `ema`, if given, is the share of the past in a running mean of the quantiles (the report says that it helps,
    not whether K3 used it); `sign_step` is the step of the `sign` rule. Raises UserError for a setting out of range.
    """

    def __init__(
        self, model: Decoder, rule: Rule = "quantile", *, bins: int = 1000, ema: float | None = None, sign_step: float = 1e-3
    ) -> None:
        if rule not in ("quantile", "sign", "none"):
            raise UserError(f'balancing.rule is "quantile", "sign" or "none", not {rule!r}')
        if bins < 1:
            raise UserError(f"balancing.bins is at least 1, not {bins}")
        if ema is not None and not 0.0 <= ema < 1.0:
            raise UserError(f"balancing.ema is in [0, 1), not {ema}")
        if not sign_step > 0.0:
            raise UserError(f"balancing.sign_step is above 0, not {sign_step}")
        self.rule: Rule = rule
        self.bins, self.ema, self.sign_step = bins, ema, sign_step
        self.routers: dict[int, Router] = model.routers()
        self.averages: dict[int, Tensor] = {}
        self.observations: dict[int, Observation] = self._blank()

    @torch.no_grad()
    def observe(self, layer: int, selection: Selection) -> None:
        """Take note of one layer's choice in one forward pass; made to be a `RoutingLog`'s observer.

        Raises ValueError for a layer without a router.
        """
        if layer not in self.observations:
            raise ValueError(f"layer {layer} has no router; those with one are {sorted(self.observations)}")
        self.observations[layer].add(selection)

    @torch.no_grad()
    def update(self) -> BalanceMetrics:
        """End the step: write each router's next bias, forget what was observed, and say how the loads were."""
        layers: dict[int, LayerBalance] = {}
        for layer, observation in self.observations.items():
            router, load = self.routers[layer], observation.counts
            routed = int(load.sum())
            if not routed:
                continue
            chosen, experts = router.config.experts_per_token, load.numel()
            layers[layer] = LayerBalance(
                max_violation=int(load.max()) * experts / routed - 1.0, utilisation=int((load > 0).sum()) / experts, load=load
            )
            if chosen == experts:
                continue
            if self.rule == "quantile":
                bias = observation.quantile(routed / experts)
                router.bias.copy_(self._smooth(layer, bias - bias.mean()))
            elif self.rule == "sign":
                router.bias += self.sign_step * torch.sign(routed - load * experts)
        self.discard()
        return BalanceMetrics(layers)

    def discard(self) -> None:
        """Forget what was observed since the last update, as after a step that is given up."""
        self.observations = self._blank()

    def state_dict(self) -> dict[str, dict[int, Tensor]]:
        """What the next update needs beside the routers' biases, as of the last update."""
        return {"averages": dict(self.averages)}

    def load_state_dict(self, state: Mapping[str, Mapping[int, Tensor]]) -> None:
        """Take up the state of `state_dict`; the biases come with the model. Raises UserError when it is of another model."""
        if set(state) != {"averages"}:
            raise UserError(f"the balancing state holds {sorted(state)}, not averages alone: it is of another version or broken")
        for layer, average in state["averages"].items():
            if layer not in self.routers or average.shape != self.routers[layer].bias.shape:
                raise UserError(f"the balancing state of layer {layer} does not fit this model's routers")
        self.averages = {
            layer: average.to(self.routers[layer].bias.device, torch.float64, copy=True) for layer, average in state["averages"].items()
        }
        self.discard()

    def _smooth(self, layer: int, bias: Tensor) -> Tensor:
        if self.ema is None:
            return bias
        past = self.averages.get(layer)
        self.averages[layer] = bias if past is None else torch.lerp(bias, past, self.ema)
        return self.averages[layer]

    def _blank(self) -> dict[int, Observation]:
        bins = self.bins if self.rule == "quantile" else 0
        return {layer: Observation(router.bias, bins) for layer, router in self.routers.items()}
