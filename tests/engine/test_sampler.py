"""The sampler against probabilities worked out by hand, and against counts of what it draws."""

from __future__ import annotations

import math

import pytest
import torch

from openk3.engine.sampler import LogitsError, SamplingParams, filtered_probabilities, sample
from openk3.errors import UserError

INF = float("inf")


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def chances(logits: torch.Tensor, **settings: float) -> list[float]:
    return filtered_probabilities(logits, [SamplingParams(**settings)])[0].tolist()  # type: ignore[arg-type]


def draw(logits: torch.Tensor, params: list[SamplingParams]) -> list[int]:
    return sample(logits, params, [one.generator() for one in params]).ids.tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": INF},
        {"temperature": True},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 1.01},
        {"top_p": -0.1},
        {"top_p": float("nan")},
        {"min_p": 2.0},
        {"min_p": -1e-9},
        {"seed": -1},
        {"seed": 2**64},
        {"temperature": "1"},
    ],
)
def test_value_outside_its_range_is_refused_by_name(settings: dict[str, object]) -> None:
    with pytest.raises(UserError, match=next(iter(settings))):
        SamplingParams(**settings)  # type: ignore[arg-type]


def test_greedy_takes_the_best_and_the_lower_id_of_a_tie() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, -1.0], [5.0, 1.0, 5.0, 5.0], [-INF, -INF, -2.0, -2.0]])
    greedy = SamplingParams(temperature=0, top_k=3, top_p=0.5, min_p=0.5)
    assert draw(logits, [greedy] * 3) == [1, 0, 2]


def test_temperature_divides_logits() -> None:
    assert chances(logits_of(0.2, 0.8), temperature=0.5) == pytest.approx([0.04 / 0.68, 0.64 / 0.68])
    assert chances(logits_of(0.2, 0.8), temperature=2.0) == pytest.approx([1 / 3, 2 / 3])


def test_top_k_keeps_the_likeliest_and_breaks_ties_by_id() -> None:
    assert chances(logits_of(0.1, 0.4, 0.3, 0.2), top_k=2) == pytest.approx([0, 4 / 7, 3 / 7, 0])
    assert chances(logits_of(0.25, 0.25, 0.25, 0.25), top_k=2) == pytest.approx([0.5, 0.5, 0, 0])
    assert chances(logits_of(0.1, 0.9), top_k=100) == pytest.approx([0.1, 0.9])


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    spread = logits_of(0.1, 0.5, 0.25, 0.15)
    assert chances(spread, top_p=0.4) == pytest.approx([0, 1, 0, 0])
    assert chances(spread, top_p=0.6) == pytest.approx([0, 2 / 3, 1 / 3, 0])
    assert chances(spread, top_p=0.8) == pytest.approx([0, 0.5 / 0.9, 0.25 / 0.9, 0.15 / 0.9])
    assert chances(spread, top_p=1.0) == pytest.approx([0.1, 0.5, 0.25, 0.15])


def test_top_p_of_zero_is_the_best_token() -> None:
    assert chances(logits_of(0.3, 0.4, 0.3), top_p=0.0) == [0, 1, 0]
    assert chances(logits_of(0.5, 0.5), top_p=0.0) == [1, 0]


def test_min_p_is_a_share_of_the_likeliest() -> None:
    spread = logits_of(0.1, 0.5, 0.25, 0.15)
    assert chances(spread, min_p=0.4) == pytest.approx([0, 2 / 3, 1 / 3, 0])
    assert chances(spread, min_p=1.0) == pytest.approx([0, 1, 0, 0])


def test_filters_apply_in_the_documented_order() -> None:
    # After the temperature of 0.5: squares 16, 9, 4, 1 (of 30). top_k=3 leaves 16, 9, 4 (of 29). top_p=0.8 needs the first two
    # (25 / 29 = 0.86). Had top-p come first, on 30: 25 / 30 = 0.83, the same two; so a p between the sums tells the order.
    spread = logits_of(0.4, 0.3, 0.2, 0.1)
    between = (25 / 30 + 25 / 29) / 2
    assert chances(spread, temperature=0.5, top_k=3, top_p=between) == pytest.approx([16 / 25, 9 / 25, 0, 0])
    assert chances(spread, temperature=0.5, top_p=between) == pytest.approx([16 / 29, 9 / 29, 4 / 29, 0])
    assert chances(spread, temperature=0.5, top_k=3, top_p=between, min_p=0.6) == pytest.approx([1, 0, 0, 0])


@pytest.mark.parametrize("temperature", [1e-300, 1e-12, 1e12, 1e300])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    found = chances(torch.tensor([[1e4, -1e4, 0.0, -INF]]), temperature=temperature)
    assert sum(found) == pytest.approx(1) and all(map(math.isfinite, found))
    assert found[3] == 0
    assert found[0] == pytest.approx(1.0 if temperature < 1 else 1 / 3, abs=1e-6)


def test_top_k_ranks_by_logit_where_probabilities_underflow() -> None:
    found = chances(torch.tensor([[-4000.0, 0.0, -3000.0]], dtype=torch.float64), top_k=2)
    assert found == [0.0, 1.0, 0.0]


def test_counts_follow_the_filtered_probabilities() -> None:
    spread = logits_of(0.1, 0.5, 0.25, 0.15)
    params = SamplingParams(temperature=0.8, top_k=3)
    expected = filtered_probabilities(spread, [params])[0]
    n = 4000
    seeds = [SamplingParams(temperature=0.8, top_k=3, seed=seed) for seed in range(n)]
    counts = torch.bincount(torch.tensor(draw(spread.expand(n, 4), seeds)), minlength=4) / n
    # Five standard deviations of a share near one half.
    assert torch.allclose(counts.to(torch.float64), expected, atol=5 * 0.5 / math.sqrt(n))
    assert counts[0] == 0


def test_never_draws_a_token_without_chance() -> None:
    logits = torch.full((1, 50), -INF)
    logits[0, [7, 8]] = 0.0
    assert set(draw(logits.expand(200, 50), [SamplingParams(seed=seed) for seed in range(200)])) == {7, 8}


def test_same_seed_same_tokens_whoever_shares_the_batch() -> None:
    torch.manual_seed(3)
    steps = torch.randn(20, 5, 97)
    params = [
        SamplingParams(seed=11),
        SamplingParams(temperature=0),
        SamplingParams(seed=11, top_k=5),
        SamplingParams(seed=4, top_p=0.7, temperature=1.3),
        SamplingParams(seed=2**63 - 1, min_p=0.1),
    ]
    together = [one.generator() for one in params]
    batch = torch.stack([sample(logits, params, together).ids for logits in steps])
    for n, one in enumerate(params):
        alone = one.generator()
        row = torch.stack([sample(logits[n : n + 1], [one], [alone]).ids[0] for logits in steps])
        assert row.tolist() == batch[:, n].tolist()
    assert len(set(map(tuple, batch.T.tolist()))) == len(params)


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(temperature=0), SamplingParams(temperature=3.0, top_k=4), SamplingParams(top_p=0.2)]
    chosen = sample(logits, params, [one.generator() for one in params])
    expected = torch.log_softmax(logits.double(), dim=1).gather(1, chosen.ids[:, None])[:, 0]
    torch.testing.assert_close(chosen.logprobs, expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("row", "kind"),
    [([float("nan")] * 4, "NaN"), ([0.0, float("nan"), 1.0, 2.0], "NaN"), ([-INF] * 4, "only −inf"), ([0.0, INF, 0.0, 1.0], r"\+inf")],
)
def test_rows_without_a_token_are_a_defined_error(row: list[float], kind: str, temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], row])
    params = [SamplingParams(temperature=temperature)] * 2
    with pytest.raises(LogitsError, match=f"sequence 1 {kind}") as caught:
        draw(logits, params)
    assert caught.value.rows == (1,)


def test_half_precision_logits_and_the_empty_batch() -> None:
    logits = torch.tensor([[1.0, 9.0, 2.0]], dtype=torch.bfloat16)
    assert draw(logits, [SamplingParams(temperature=0)]) == [1]
    nobody = sample(torch.empty(0, 3), [], [])
    assert nobody.ids.shape == (0,) and nobody.logprobs.shape == (0,)


def test_sizes_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="one row for each"):
        sample(torch.zeros(2, 3), [SamplingParams()], [SamplingParams().generator()])
