"""What must stay in fp32 stays in fp32, bit for bit, however the model is built or moved."""

from __future__ import annotations

import torch

from openk3 import Decoder, DecoderState, ModelConfig, Segments
from openk3.model.kda import KDA
from openk3.model.moe import Router
from openk3.model.state import LatentMemory, RecurrentMemory

ISLANDS = ("A_log", "dt_bias", "q_conv", "k_conv", "v_conv", "o_norm", "router.bias")


def islands(model: Decoder) -> dict[str, torch.Tensor]:
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor for name, tensor in tensors.items() if name.endswith(ISLANDS)}


def fill_awkwardly(model: Decoder) -> None:
    """Values that bfloat16 cannot hold: 238 steps between 6.817 and 7.063 collapse to a handful there."""
    with torch.no_grad():
        for tensor in islands(model).values():
            tensor.copy_(torch.linspace(6.817, 7.063, tensor.numel()).view_as(tensor))


def test_moving_to_bfloat16_leaves_islands_untouched() -> None:
    model = Decoder(ModelConfig.named("debug13"))
    fill_awkwardly(model)
    before = {name: tensor.clone() for name, tensor in islands(model).items()}
    assert len(before) == 9 * 6 + 12
    for moved in (model.to(torch.bfloat16), model.half(), model.to("cpu", torch.bfloat16)):
        for name, tensor in islands(moved).items():
            assert tensor.dtype == torch.float32, name
            assert torch.equal(tensor, before[name]), name
        assert moved.layers[0].attn.q_proj.weight.dtype in (torch.bfloat16, torch.float16)
    for name, tensor in islands(model.double()).items():
        assert tensor.dtype == torch.float64, name


def test_building_under_a_bfloat16_default() -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Decoder(ModelConfig.named("debug13"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.embed.weight.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in islands(model).values()} == {torch.float32}


def test_a_bfloat16_model_runs_and_keeps_its_recurrent_state_in_fp32() -> None:
    model = Decoder(ModelConfig.named("debug13")).bfloat16()
    state = DecoderState.empty(model.config, sequences=2, dtype=torch.bfloat16)
    with torch.no_grad():
        out = model(torch.arange(20), Segments.of([13, 7]), state)
        out = model(torch.arange(2), Segments.of([1, 1]), state)
    assert out.logits.dtype == torch.bfloat16 and bool(out.logits.isfinite().all())
    for memory in state.layers:
        if isinstance(memory, RecurrentMemory):
            assert memory.recurrent.dtype == torch.float32
            assert {tail.dtype for tail in memory.tails} == {torch.bfloat16}
        elif isinstance(memory, LatentMemory):
            assert {buffer.dtype for buffer in memory.buffers} == {torch.bfloat16}


def test_starting_weights() -> None:
    model = Decoder(ModelConfig.named("debug13"), generator=torch.Generator().manual_seed(0))
    again = Decoder(ModelConfig.named("debug13"), generator=torch.Generator().manual_seed(0))
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert bool(a.isfinite().all()), name
    for module in model.modules():
        if isinstance(module, KDA):
            assert not module.A_log.any(), "the bounded gate starts at exp(0)"
            decay = 5 * torch.sigmoid(module.dt_bias.detach())
            assert 1e-3 <= float(decay.min()) and float(decay.max()) <= 1.0
        if isinstance(module, Router):
            assert not module.bias.any()
    queries = [p for name, p in model.named_parameters() if name.endswith(".query")]
    assert len(queries) == 2 * 13 + 1 and not any(bool(q.any()) for q in queries)
