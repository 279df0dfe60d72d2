"""The assembled model learns: one batch by heart with each system on and off, and 896 experts stay balanced."""

from __future__ import annotations

import pytest
import torch

from openk3 import Decoder, ModelConfig, RoutingLog, Segments
from openk3.train.balancing import Balancer

SWITCHES: dict[str, dict[str, object]] = {
    "everything on": {},
    "no KDA": {"mla_layers": tuple(range(13))},
    "no MLA": {"mla_layers": ()},
    "no MLA gate": {"mla_output_gate": False},
    "no query latent": {"q_lora_rank": None},
    "no experts": {"num_experts": None, "latent_size": None, "latent_norm": False},
    "no latent": {"latent_size": None, "latent_norm": False},
    "no latent norm": {"latent_norm": False},
    "no shared experts": {"num_shared_experts": 0},
    "no AttnRes": {"attn_res_block_size": None},
    "SwiGLU": {"activation": "silu"},
    "softplus gate": {"kda_gate_lower_bound": None},
    "low-rank gate": {"kda_full_rank_gate": False},
    "tied head": {"tie_word_embeddings": True},
}


PEAK = 8e-3
QUICK = ("everything on", "no AttnRes")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SWITCHES])
def test_one_batch_is_learnt_by_heart(name: str) -> None:
    torch.manual_seed(0)
    config = ModelConfig.named("debug13").replace(**SWITCHES[name])
    model = Decoder(config, generator=torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(1)
    lengths = [9, 1, 6]
    tokens = torch.randint(0, config.vocab_size, (sum(lengths),), generator=g)
    targets = torch.randint(0, config.vocab_size, (sum(lengths),), generator=g)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.0)
    loss = float("inf")
    for step in range(300):
        for group in optimizer.param_groups:
            group["lr"] = PEAK * min(1.0, (step + 1) / 10)
        terms = model.loss(tokens, Segments.of(lengths), targets)
        mean = terms.total / sum(lengths)
        optimizer.zero_grad()
        mean.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss = float(mean.detach())
        if loss < 0.01:
            break
    assert loss < 0.01, f"{name}: loss {loss:.4f} after {step + 1} steps"


def test_896_experts_of_which_16_train_and_balance_within_ten_steps() -> None:
    config = ModelConfig.named("debug13").replace(
        num_experts=896, experts_per_token=16, num_layers=4, mla_layers=(3,), moe_intermediate_size=8
    )
    model = Decoder(config, generator=torch.Generator().manual_seed(0))
    balancer = Balancer(model, rule="quantile")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, config.vocab_size, (2048,), generator=g)
    targets = torch.randint(0, config.vocab_size, (2048,), generator=g)
    worst = []
    for _ in range(10):
        counts: dict[int, torch.Tensor] = {}

        def observe(layer: int, selection: object, counts: dict[int, torch.Tensor] = counts) -> None:
            counts[layer] = torch.bincount(selection.ids.flatten(), minlength=896)  # type: ignore[attr-defined]
            balancer.observe(layer, selection)  # type: ignore[arg-type]

        terms = model.loss(tokens, Segments.of([1024, 1024]), targets, routing=RoutingLog(observe))
        optimizer.zero_grad()
        (terms.total / 2048).backward()
        optimizer.step()
        balancer.update()
        worst.append(max(float(count.max()) / (2048 * 16 / 896) - 1 for count in counts.values()))
    assert worst[0] > 1.0, "the first batch is routed without any balancing"
    assert max(worst[5:]) < 0.8, f"max-violation over steps: {[round(w, 2) for w in worst]}"
