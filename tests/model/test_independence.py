"""No token sees a later one, and no document sees another: by perturbation, bit for bit where a document is concerned."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from openk3 import Decoder, ModelConfig, Segments
from tests.support import worst

LENGTHS = [70, 33, 1, 64]


def build(dtype: torch.dtype, **changes: object) -> Decoder:
    # Two full AttnRes blocks and a short one, every kind of layer.
    shallow: dict[str, object] = {"num_layers": 5, "mla_layers": (3, 4), "attn_res_block_size": 2}
    config = ModelConfig.named("debug13").replace(**(shallow | changes))
    return Decoder(config, generator=torch.Generator().manual_seed(0)).to(dtype)


def batch(config: ModelConfig) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    total = sum(LENGTHS)
    return torch.randint(0, config.vocab_size, (total,), generator=g), torch.randint(0, config.vocab_size, (total,), generator=g)


@torch.no_grad()
@pytest.mark.parametrize("position", [0, 15, 16, 40, 63, 64, 69])
@pytest.mark.parametrize("experts", [8, None])
def test_no_token_sees_a_later_one(position: int, experts: int | None) -> None:
    """Bit for bit without routed experts; with them a later token changes the row count of a matrix product, hence its rounding."""
    model = build(torch.float64) if experts else build(torch.float64, num_experts=None, latent_size=None, latent_norm=False)
    tokens, _ = batch(model.config)
    tokens = tokens[:70]
    changed = tokens.clone()
    changed[position] = (changed[position] + 1) % model.config.vocab_size
    before, after = (model(t, Segments.of([70])).logits for t in (tokens, changed))
    assert worst(before[:position], after[:position]) <= (1e-12 if experts else 0.0)
    assert worst(before[position], after[position]) > 1e-6


@pytest.mark.parametrize("changed_document", range(len(LENGTHS)))
@pytest.mark.parametrize(
    "changes",
    [{}, {"mla_layers": ()}, {"mla_layers": tuple(range(5))}, {"num_experts": None, "latent_size": None, "latent_norm": False}],
    ids=["whole", "kda-only", "mla-only", "dense"],
)
def test_packed_documents_do_not_see_each_other(changed_document: int, changes: dict[str, object]) -> None:
    """One document's tokens change; the losses of the others and every gradient of those losses stay bit-equal."""
    model = build(torch.float32, **changes)
    tokens, targets = batch(model.config)
    segments = Segments.of(LENGTHS)
    start, stop = segments.starts[changed_document], segments.starts[changed_document] + LENGTHS[changed_document]
    weights = torch.ones(len(tokens))
    weights[start:stop] = 0
    results = []
    for shift in (0, 1):
        here = tokens.clone()
        here[start:stop] = (here[start:stop] + shift * 17) % model.config.vocab_size
        model.zero_grad()
        terms = model.loss(here, segments, targets, weights)
        terms.total.backward()
        results.append(
            (terms.per_token[weights > 0].clone(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        )
    (losses, grads), (other_losses, other_grads) = results
    assert torch.equal(losses, other_losses)
    for name, grad in grads.items():
        if name == "embed.weight":
            continue
        assert torch.equal(grad, other_grads[name]), name
    kept = tokens[weights > 0].unique()
    assert torch.equal(grads["embed.weight"][kept], other_grads["embed.weight"][kept])
