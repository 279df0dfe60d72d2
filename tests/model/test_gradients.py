"""Gradients of every parameter: the fast forms against automatic differentiation of the plain ones, in float64, and at the extremes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from openk3 import Decoder, ModelConfig, Segments
from openk3.model.kda import KDA
from openk3.ops import backend
from tests.support import worst

LENGTHS = [1, 2, 3, 15, 16, 17, 63, 64, 65, 130]


def model_of(**changes: object) -> Decoder:
    # Two full AttnRes blocks and a short one, every kind of layer.
    shallow = {"num_layers": 5, "mla_layers": (3, 4), "attn_res_block_size": 2}
    config = ModelConfig.named("debug13").replace(**{**shallow, **changes})
    model = Decoder(config, generator=torch.Generator().manual_seed(0)).double()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # Zero queries, biases and unit norms hide mistakes: move everything off its start.
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith((".query", ".bias", "norm_weight", "norm.weight", "o_norm", "A_log")):
                tensor.add_(torch.randn(tensor.shape, generator=g, dtype=torch.float64) * 0.2)
    return model


def loss_and_gradients(model: Decoder, lengths: list[int], form: str, recompute: str = "none") -> tuple[float, dict[str, Tensor]]:
    g = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    tokens = torch.randint(0, model.config.vocab_size, (total,), generator=g)
    targets = torch.randint(-1, model.config.vocab_size, (total,), generator=g)
    model.zero_grad(set_to_none=True)
    with backend.use(form):
        terms = model.loss(tokens, Segments.of(lengths), targets, recompute=recompute)
        terms.total.backward()
    return float(terms.total.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        assert bool(actual[name].isfinite().all()), name
        assert worst(actual[name], grad) <= tolerance * max(1.0, float(grad.abs().max())), name


@pytest.mark.parametrize("length", LENGTHS)
def test_every_gradient_at_each_length(length: int) -> None:
    model = model_of()
    loss, grads = loss_and_gradients(model, [length], "torch")
    expected_loss, expected = loss_and_gradients(model, [length], "reference")
    assert abs(loss - expected_loss) < 1e-9 * max(1.0, expected_loss)
    assert_same(grads, expected, 1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        {"kda_gate_lower_bound": None},
        {"kda_full_rank_gate": False},
        {"activation": "silu"},
        {"attn_res_block_size": None},
        {"latent_size": None, "latent_norm": False},
        {"q_lora_rank": None, "mla_output_gate": False},
        {"tie_word_embeddings": True},
        {"num_shared_experts": 0, "renormalize": False, "router_activation": "softmax"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_gradient_of_each_kind(changes: dict[str, object]) -> None:
    model = model_of(**changes)
    loss, grads = loss_and_gradients(model, [19, 1, 70], "torch")
    expected_loss, expected = loss_and_gradients(model, [19, 1, 70], "reference")
    assert abs(loss - expected_loss) < 1e-9 * max(1.0, expected_loss)
    assert_same(grads, expected, 1e-9)


def test_only_dead_parameters_have_no_gradient() -> None:
    """Layer 0 reads no mix before its attention, so that reader's parameters exist (as in the release) and stay untouched."""
    model = model_of()
    _, grads = loss_and_gradients(model, [130], "torch")
    missing = {name for name, _ in model.named_parameters()} - grads.keys()
    assert missing == {"layers.0.attn_res.norm_weight", "layers.0.attn_res.query"}


@pytest.mark.parametrize("recompute", ["layer", "block"])
@pytest.mark.parametrize("block", [2, None])
def test_recompute_changes_nothing(recompute: str, block: int | None) -> None:
    model = model_of(attn_res_block_size=block)
    loss, grads = loss_and_gradients(model, [40, 7], "torch")
    again, recomputed = loss_and_gradients(model, [40, 7], "torch", recompute)
    assert loss == again
    assert_same(recomputed, grads, 0.0)


@pytest.mark.parametrize("length", LENGTHS)
def test_finite_at_the_strongest_decay_with_equal_keys_and_full_writes(length: int) -> None:
    model = model_of().float()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, KDA):
                module.dt_bias.fill_(200.0)
                module.A_log.fill_(3.0)
                module.k_proj.weight.zero_()
                module.k_conv.zero_()
                module.beta_proj.weight.fill_(50.0)
    loss, grads = loss_and_gradients(model, [length], "torch")
    assert loss == loss
    for name, grad in grads.items():
        assert bool(grad.isfinite().all()), name
