"""The estimate of a training step's memory, held against what a real step keeps."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from openk3 import accounting
from openk3.config import ModelConfig
from openk3.model.decoder import Decoder, Recompute
from openk3.ops.segments import Segments
from openk3.train.optimizer import OptimizerConfig, build_optimizer

TOKENS = 256


SIX_LAYERS: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 192,
    "num_layers": 6,
    "mla_layers": (3, 5),
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "v_head_dim": 48,
    "kda_num_heads": 4,
    "kda_head_dim": 48,
    "intermediate_size": 512,
    "num_experts": 16,
    "experts_per_token": 4,
    "moe_intermediate_size": 96,
    "latent_size": 96,
}
"""Nano's systems in more layers."""


def small(**changes: Any) -> ModelConfig:
    """Wide enough that rows of one number a token do not count, narrow enough to be quick."""
    sizes = {"vocab_size": 64, "hidden_size": 96, "num_experts": 4, "experts_per_token": 2, "intermediate_size": 192, "kda_head_dim": 32}
    sizes |= {"q_lora_rank": 48, "kv_lora_rank": 32, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return ModelConfig.named("nano").replace(**(SIX_LAYERS | sizes | changes))


def kept_bytes(config: ModelConfig, lengths: list[int], recompute: Recompute, autocast: bool) -> int:
    """Bytes of distinct storages that live between forward and backward of a real model, without weights and the head's gradient.

    Saved tensors are seen by hooks, and what activation recompute holds outside the graph by the garbage collector.
    """
    model = Decoder(config, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(config.vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(1))
    gc.collect()
    before = {tensor.untyped_storage().data_ptr() for tensor in living_tensors()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in before:
            kept[storage.data_ptr()] = storage  # held, so that no later tensor takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        terms = model.loss(tokens, Segments.of(lengths), tokens, recompute=recompute)
    for tensor in living_tensors():
        pack(tensor)
    assert terms.total.requires_grad
    return sum(storage.nbytes() for storage in kept.values()) - 4 * config.vocab_size * config.hidden_size


def living_tensors() -> list[Tensor]:
    return [thing for thing in gc.get_objects() if type(thing) in (Tensor, torch.nn.Parameter)]


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16-autocast"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mla_layers": ()},
        {"mla_layers": tuple(range(6))},
        {"mla_layers": tuple(range(6)), "q_lora_rank": None, "mla_output_gate": False},
        {"attn_res_block_size": None},
        {"num_experts": None},
        {"latent_size": None, "num_shared_experts": 0, "kda_full_rank_gate": False, "kda_gate_lower_bound": None},
    ],
    ids=str,
)
def test_activations(changes: dict[str, Any], autocast: bool) -> None:
    config = small(**changes)
    needed = accounting.training_bytes(config, tokens=TOKENS, precision="bf16-autocast" if autocast else "fp32")
    real = kept_bytes(config, [TOKENS], "none", autocast)
    assert 0.97 < (needed["activations"] + needed["half weights"]) / real < 1.05


def test_short_sequences_keep_fewer_states() -> None:
    config = small(mla_layers=())
    long, short = (accounting.activation_bytes(config, TOKENS, sequence_length=length) for length in (None, 32))
    assert long > short
    assert 0.97 < short / kept_bytes(config, [32] * (TOKENS // 32), "none", False) < 1.05


def test_recompute_keeps_less() -> None:
    config = small()
    none, layer, block = (accounting.activation_bytes(config, TOKENS, recompute=mode) for mode in ("none", "layer", "block"))
    assert layer < block < none
    # What is kept between the passes; the one layer or block that is made again comes on top.
    for mode, estimate, groups in (("layer", layer, 6), ("block", block, 3)):
        size = 6 // groups
        again = max(
            sum(accounting.saved_by_layer(config, i).bytes("fp32") for i in range(start, start + size)) for start in range(0, 6, size)
        )
        between = estimate - TOKENS * again
        assert 0.9 < between / kept_bytes(config, [TOKENS], mode, False) < 1.1  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["muon", "adamw"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "q_lora_rank": None, "kda_full_rank_gate": False}], ids=str)
def test_optimizer_state(kind: Any, changes: dict[str, Any]) -> None:
    config = small(**changes)
    optimizer = build_optimizer(Decoder(config), OptimizerConfig(kind=kind))
    real = sum(tensor.nbytes for tensors in optimizer.state_dict().values() for tensor in tensors.values())
    assert accounting.optimizer_bytes(config, kind) == real
    if kind == "muon":
        assert {parameter.name for parameter in accounting.parameters(config) if parameter.muon} == set(optimizer.groups["muon"])


def test_weights_and_gradients() -> None:
    config = small(tie_word_embeddings=True)
    model = Decoder(config)
    needed = accounting.training_bytes(config, tokens=64)
    assert needed["weights"] == sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    assert needed["gradients"] == sum(parameter.nbytes for parameter in model.parameters())
    assert needed["half weights"] == 0


def test_more_takes_more() -> None:
    config = small()
    sizes = [sum(accounting.training_bytes(config, tokens=tokens).values()) for tokens in (0, 1, 100, 1000, 10_000)]
    assert sizes == sorted(sizes) and sizes[2] < sizes[3] < sizes[4]
    with_bf16 = accounting.training_bytes(config, tokens=10_000, precision="bf16-autocast")
    assert with_bf16["activations"] < accounting.training_bytes(config, tokens=10_000)["activations"]


def live_peak(step: Callable[[], None], file: Path) -> int:
    """The most bytes that torch's allocator gave out during `step`, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    profiler.export_chrome_trace(str(file))
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most


@pytest.mark.parametrize("recompute", ["none", "layer", "block"])
def test_peak_of_a_whole_step(recompute: Recompute, tmp_path: Path) -> None:
    """A second micro-batch, whose gradients are added to those of the first: the moment when most is held."""
    config = small(vocab_size=2048, moe_intermediate_size=192)
    model = Decoder(config, generator=torch.Generator().manual_seed(0))
    optimizer = build_optimizer(model)
    tokens = torch.randint(config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(1))

    def micro_batch() -> None:
        model.loss(tokens, Segments.of([TOKENS]), tokens, recompute=recompute).total.backward()

    def rest_of_the_step() -> None:
        micro_batch()
        optimizer.step()

    micro_batch()
    held = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()])
    # Layer 0's attention has nothing to mix, so its two vectors get no gradient; they are counted all the same.
    held += sum(parameter.nbytes for parameter in model.parameters())
    held += sum(tensor.nbytes for tensors in optimizer.state_dict().values() for tensor in tensors.values())
    needed = accounting.training_bytes(config, tokens=TOKENS, recompute=recompute)
    assert needed["weights"] + needed["gradients"] + needed["optimizer"] == held
    peak = held + live_peak(rest_of_the_step, tmp_path / "trace.json")
    assert 0.97 < sum(needed.values()) / peak < 1.15
