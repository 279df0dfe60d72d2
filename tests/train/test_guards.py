"""What trips the guard, and where it says the fault began."""

from __future__ import annotations

import math

import pytest
import torch

from openk3 import Decoder, ModelConfig, Segments
from openk3.train.guards import LossGuard, all_finite, locate, locate_gradient


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_trips_at_once(loss: float) -> None:
    assert LossGuard(3.0, 50).check(loss) == f"the loss is {loss}"


def test_a_leap_above_the_median_trips_and_is_not_remembered() -> None:
    guard = LossGuard(leap=1.0, window=10)
    for loss in (5.0, 4.0, 3.0, 2.0):
        assert guard.check(loss) is None
    # The median of 5, 4, 3, 2 is 3.5: 4.5 is the last loss that passes.
    assert guard.check(4.5001) == "the loss leapt to 4.500 from a median of 3.500 over the last 4 steps"
    assert guard.state_dict() == [5.0, 4.0, 3.0, 2.0]
    assert guard.check(4.5) is None


def test_a_young_run_has_no_median() -> None:
    guard = LossGuard(leap=1.0, window=50)
    for loss in [1.0, 9.0] * 4 + [1.0]:
        assert guard.check(loss) is None
    assert guard.check(9.0) is None  # nine losses are one too few for a tenth to be judged
    assert guard.check(9.0) is not None


def test_old_losses_are_forgotten() -> None:
    guard = LossGuard(leap=0.5, window=5)
    for loss in (9.0, 9.0, 9.0, 1.0, 1.0, 1.0):
        assert guard.check(loss) is None
    assert guard.state_dict() == [9.0, 9.0, 1.0, 1.0, 1.0]
    assert guard.check(2.0) is not None


def test_it_goes_on_from_its_state() -> None:
    guard = LossGuard(leap=1.0, window=10)
    for loss in (3.0, 2.0, 1.0):
        guard.check(loss)
    other = LossGuard(leap=1.0, window=10)
    other.load_state_dict(guard.state_dict())
    assert other.check(3.1) == "the loss leapt to 3.100 from a median of 2.000 over the last 3 steps"


def test_all_finite() -> None:
    assert all_finite([torch.zeros(3), torch.tensor([1e38, -1e38, 1e38])])
    assert not all_finite([torch.zeros(3), torch.tensor([0.0, math.nan])])
    assert not all_finite([torch.tensor([math.inf])])


def batch(model: Decoder) -> tuple[torch.Tensor, Segments, torch.Tensor]:
    tokens = torch.arange(12) % model.config.vocab_size
    return tokens, Segments.of([7, 5]), tokens.roll(-1)


def test_a_broken_weight_is_named() -> None:
    model = Decoder(ModelConfig.named("debug13"), generator=torch.Generator().manual_seed(0))
    tokens, segments, _ = batch(model)
    assert locate(model, tokens, segments) is None
    with torch.no_grad():
        model.layers[2].mlp.router.weight[1, 1] = math.nan
    assert locate(model, tokens, segments) == "the weight layers.2.mlp.router.weight is not finite"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("layers.3.mlp.latent_up.weight", "the output of layer 3 (MLA) is the first that is not finite"),
        ("layers.0.mlp.down_proj.weight", "the output of layer 0 (KDA) is the first that is not finite"),
        ("layers.4.attn.o_proj.weight", "in layer 4, the router's score is NaN"),
    ],
)
def test_the_first_layer_that_breaks_is_named(place: str, said: str) -> None:
    model = Decoder(ModelConfig.named("debug13"), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        # Finite themselves, but not what they are multiplied with: infinities of both signs add up to NaN.
        model.get_parameter(place).fill_(3e38)
        model.get_parameter(place)[::2] *= -1
    tokens, segments, _ = batch(model)
    found = locate(model, tokens, segments)
    assert found is not None and found.startswith(said), found
    assert not model.layers[0]._forward_hooks


def test_the_gradient_nearest_to_the_loss_is_named() -> None:
    model = Decoder(ModelConfig.named("debug13"), generator=torch.Generator().manual_seed(0))
    tokens, segments, targets = batch(model)
    model.loss(tokens, segments, targets).total.backward()
    assert locate_gradient(model) is None
    for name, parameter in model.named_parameters():
        if name.startswith(("layers.2.", "layers.0.")) and parameter.grad is not None:
            parameter.grad.fill_(math.inf)
    said = locate_gradient(model)
    assert said is not None and said.startswith("the first gradient that is not finite is that of layers.2.mlp_res."), said
