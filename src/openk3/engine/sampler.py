"""From a row of logits to the next token: greedy, or by chance within what temperature, top-k, top-p and min-p leave.

Order of the filters, each on the distribution that the one before leaves, renormalised:

    temperature → top-k (the k most likely) → top-p (the fewest that hold p of the mass) → min-p (at least min_p of the likeliest)

Ties go to the lower id everywhere. A sequence draws one number a token from a generator of its own, and every step works row by row in
float64, so what a sequence gets depends on its logits, its parameters and its seed, never on who else is in the batch.

Letters: N sequences, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.errors import UserError

MAX_SEED = 2**63 - 1


class LogitsError(UserError):
    """A model gave logits that no token can be drawn from. `faults` holds (sequence, what its row is like); the others are sound."""

    def __init__(self, faults: Sequence[tuple[int, str]]) -> None:
        self.faults = tuple(faults)
        what = "; ".join(f"sequence {row} {kind}" for row, kind in faults[:4]) + ("; …" if len(faults) > 4 else "")
        super().__init__(f"no token can be drawn from the model's logits: {what}. Its weights are damaged, or every token was forbidden")

    @property
    def rows(self) -> tuple[int, ...]:
        """The sequences concerned."""
        return tuple(row for row, _ in self.faults)

    def renumbered(self, sequences: Sequence[int]) -> LogitsError:
        """The same error where row n of the batch is sequence `sequences[n]`."""
        return LogitsError([(sequences[row], kind) for row, kind in self.faults])


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Raises UserError for a value outside its range."""

    temperature: float = 1.0
    """Logits are divided by it. 0 is greedy: the most likely token, the lower id of a tie; the filters then change nothing."""
    top_k: int = 0
    """Keep the k most likely tokens. 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest tokens whose probabilities reach p, from the likeliest down; always at least one. 1 keeps all, 0 the best one."""
    min_p: float = 0.0
    """Keep tokens at least this share as likely as the likeliest. 0 keeps all, 1 the best one (and its ties)."""
    seed: int = 0
    """Of the sequence's own generator: same seed, same logits, same tokens."""

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _whole("top_k", self.top_k, "0 (keep all) or more", None)
        _whole("seed", self.seed, f"0 to {MAX_SEED}", MAX_SEED)

    @property
    def greedy(self) -> bool:
        """Whether no chance is involved."""
        return self.temperature == 0

    def generator(self) -> torch.Generator:
        """A fresh generator for one sequence, on the CPU."""
        return torch.Generator().manual_seed(self.seed)


@dataclass(frozen=True)
class Sampled:
    """One chosen token for each sequence."""

    ids: Tensor
    """int64 `[N]` on the CPU."""
    logprobs: Tensor
    """float64 `[N]`, nats: the log-probability of each chosen token under the model's own distribution, before temperature and filters."""


def sample(logits_NV: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator]) -> Sampled:
    """Choose the next token of each sequence.

    `logits_NV`: `[N, V]`, any floating dtype; −inf forbids a token. `generators`: one a sequence, advanced by one draw unless it is greedy.
    Raises LogitsError for a row that holds NaN or +inf, or nothing but −inf; ValueError when the sizes do not match.
    """
    if logits_NV.dim() != 2 or len(params) != logits_NV.shape[0] or len(generators) != logits_NV.shape[0]:
        raise ValueError(
            f"logits {list(logits_NV.shape)} need one row for each of {len(params)} parameters and {len(generators)} generators"
        )
    if logits_NV.shape[0] == 0:
        return Sampled(torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.float64))
    wide_NV = logits_NV.detach().to(torch.float64)
    _check(wide_NV)
    ids_N = wide_NV.argmax(dim=1)
    drawn = [n for n, one in enumerate(params) if not one.greedy]
    if drawn:
        chosen = [params[n] for n in drawn]
        uniform = torch.cat([torch.rand(1, generator=generators[n], dtype=torch.float64) for n in drawn])
        rows_NV = wide_NV if len(drawn) == len(params) else wide_NV[drawn]
        ids_N[drawn] = _invert(filtered_probabilities(rows_NV, chosen), uniform.to(wide_NV.device))
    chosen_N = wide_NV.gather(1, ids_N[:, None])[:, 0]
    logprobs_N = chosen_N - torch.logsumexp(wide_NV, dim=1)
    return Sampled(ids_N.cpu(), logprobs_N.cpu())


def filtered_probabilities(logits_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """What each token's chance is: float64 `[N, V]`, zero where a filter took the token away, each row summing to 1.

    `logits_NV` as in `sample`, valid rows only; a greedy row has 1 at its best token.
    """
    wide_NV = logits_NV.to(torch.float64)
    vocabulary = wide_NV.shape[1]
    greedy = torch.tensor([[one.greedy] for one in params], device=wide_NV.device)
    temperature_N1 = wide_NV.new_tensor([[one.temperature or 1.0] for one in params])
    # Shifted before it is divided: a tiny temperature then sends the others to −inf instead of the best to +inf.
    scaled_NV = (wide_NV - wide_NV.amax(dim=1, keepdim=True)) / temperature_N1
    chance_NV = torch.softmax(scaled_NV, dim=1)
    narrowed = [n for n, one in enumerate(params) if one.greedy or 0 < one.top_k < vocabulary or one.top_p < 1]
    if narrowed:
        chance_NV[narrowed] = _narrow(chance_NV[narrowed], wide_NV[narrowed], [params[n] for n in narrowed], greedy[narrowed])
    min_p_N1 = wide_NV.new_tensor([[one.min_p] for one in params])
    chance_NV = chance_NV.masked_fill(chance_NV < min_p_N1 * chance_NV.amax(dim=1, keepdim=True), 0.0)
    return chance_NV / chance_NV.sum(dim=1, keepdim=True)


def _narrow(chance_NV: Tensor, logits_NV: Tensor, params: Sequence[SamplingParams], greedy_N1: Tensor) -> Tensor:
    """Top-k, then top-p, on rows that ask for either."""
    vocabulary = chance_NV.shape[1]
    # By logit, not by probability: far below the best, probabilities underflow to equal zeros.
    order_NV = torch.sort(logits_NV, dim=1, descending=True, stable=True).indices
    ranked_NV = chance_NV.gather(1, order_NV)
    rank_V = torch.arange(vocabulary, device=chance_NV.device)
    top_k_N1 = torch.tensor([[min(one.top_k or vocabulary, vocabulary)] for one in params], device=chance_NV.device)
    ranked_NV = ranked_NV.masked_fill(rank_V >= torch.where(greedy_N1, 1, top_k_N1), 0.0)
    ranked_NV = ranked_NV / ranked_NV.sum(dim=1, keepdim=True)
    top_p_N1 = chance_NV.new_tensor([[one.top_p] for one in params])
    before_NV = ranked_NV.cumsum(dim=1) - ranked_NV
    dropped_NV = (before_NV >= top_p_N1) & (top_p_N1 < 1) & (rank_V > 0)
    ranked_NV = ranked_NV.masked_fill(dropped_NV, 0.0)
    return torch.zeros_like(chance_NV).scatter_(1, order_NV, ranked_NV)


def _invert(chance_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """The token at which each row's cumulated chance passes `uniform` in [0, 1); never one of chance zero."""
    reached_NV = chance_NV.cumsum(dim=1)
    total_N1 = reached_NV[:, -1:]
    ids_N1 = torch.searchsorted(reached_NV, (uniform_N[:, None] * total_N1).contiguous(), right=True)
    # u·total may round up to the total itself, which lies past the last token that has a chance.
    last_N1 = (reached_NV < total_N1).sum(dim=1, keepdim=True)
    return torch.minimum(ids_N1, last_N1)[:, 0]


def _check(logits_NV: Tensor) -> None:
    """Raise LogitsError unless every row holds a token that can be drawn."""
    if logits_NV.shape[1] == 0:
        raise LogitsError([(n, "no token at all") for n in range(logits_NV.shape[0])])
    # A maximum is NaN when anything in its row is.
    best_N = logits_NV.amax(dim=1).tolist()
    faults = [
        (n, "NaN" if math.isnan(best) else "+inf" if best > 0 else "only −inf") for n, best in enumerate(best_N) if not math.isfinite(best)
    ]
    if faults:
        raise LogitsError(faults)


def _number(name: str, value: object, low: float, high: float) -> None:
    sound = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and low <= value <= high
    if not sound:
        limits = f"{low:g} or more" if math.isinf(high) else f"from {low:g} to {high:g}"
        raise UserError(f"{name} is {value!r}; it must be a number {limits}")


def _whole(name: str, value: object, limits: str, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0 or (high is not None and value > high):
        raise UserError(f"{name} is {value!r}; it must be a whole number, {limits}")
