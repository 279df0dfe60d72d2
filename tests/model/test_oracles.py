"""The assembled model against numbers that the release's own code produced, loaded from release-layout files."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import openk3
from openk3 import Decoder, DecoderState, Segments, Trace
from openk3.errors import UserError
from openk3.model.routing_log import RoutingLog
from openk3.model.state import LatentMemory, RecurrentMemory
from tests.support import ORACLES, oracle_json, oracle_tensors, worst

K3 = ORACLES / "k3_tiny"
KIMI_LINEAR = ORACLES / "kimi_linear_tiny_release"
VARIANTS = sorted(oracle_json("k3_tiny/golden")["report"]["variants"])
EXACT = 1e-9


def golden(name: str) -> dict[str, Tensor]:
    return oracle_tensors(f"{name}/golden")


def flat(ids: Tensor) -> tuple[Tensor, Segments]:
    return ids.flatten(), Segments.of([ids.shape[1]] * ids.shape[0])


@pytest.fixture(scope="module")
def k3_64() -> Decoder:
    return openk3.load(K3 / "model", dtype=torch.float64)


@pytest.fixture(scope="module")
def k3_32() -> Decoder:
    return openk3.load(K3 / "model")


@torch.no_grad()
def test_k3_in_float64_is_the_release(k3_64: Decoder) -> None:
    g = golden("k3_tiny")
    tokens, segments = flat(g["full.input_ids"])
    state = DecoderState.empty(k3_64.config, sequences=2, dtype=torch.float64)
    log = RoutingLog()
    out = k3_64(tokens, segments, state, hidden_states=True, routing=log)
    assert worst(out.logits.view(2, 48, -1), g["full64.logits"]) < EXACT
    assert out.hidden_states is not None and len(out.hidden_states) == 10
    for layer in range(9):
        assert worst(out.hidden_states[layer + 1].view(2, 48, -1), g[f"full64.layer.{layer}.prefix_sum"]) < EXACT
    for layer, ids in log.ids.items():
        assert torch.equal(ids.view(2, 48, -1), g[f"full.router.{layer}.indices"])
    for layer, memory in enumerate(state.layers):
        if isinstance(memory, RecurrentMemory):
            assert worst(memory.recurrent.transpose(2, 3), g[f"full64.cache.{layer}.recurrent_state_vk"]) < EXACT


@torch.no_grad()
def test_k3_in_fp32_is_within_the_stated_tolerance(k3_32: Decoder) -> None:
    g = golden("k3_tiny")
    tokens, segments = flat(g["full.input_ids"])
    state = DecoderState.empty(k3_32.config, sequences=2)
    weights: dict[int, Tensor] = {}
    log = RoutingLog(lambda layer, selection: weights.__setitem__(layer, selection.weights))
    trace = Trace.of("mixing")
    out = k3_32(tokens, segments, state, hidden_states=True, routing=log, trace=trace)
    assert out.logits.dtype == torch.float32
    assert worst(out.logits.view(2, 48, -1), g["full.logits"]) < 2e-3
    assert worst(torch.stack(out.blocks, dim=1).view(2, 48, 3, -1), g["full.block_residual"]) < 2e-3
    for layer in range(9):
        if layer:
            assert worst(trace.values["mixing"][f"layer.{layer}.attn"].view(2, 48, -1), g[f"full.probs.attn.{layer}"]) < 1e-4
            assert torch.equal(log.ids[layer].view(2, 48, -1), g[f"full.router.{layer}.indices"])
            assert worst(weights[layer].view(2, 48, -1), g[f"full.router.{layer}.weights"]) < 1e-4
        assert worst(trace.values["mixing"][f"layer.{layer}.mlp"].view(2, 48, -1), g[f"full.probs.mlp.{layer}"]) < 1e-4
        memory = state.layers[layer]
        if isinstance(memory, RecurrentMemory):
            for tail, letter in zip(memory.tails, "qkv", strict=True):
                assert worst(tail, g[f"full.cache.{layer}.conv_{letter}"][..., 1:]) < 1e-4
    assert worst(trace.values["mixing"]["output"].view(2, 48, -1), g["full.probs.output"]) < 1e-4


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_every_variant_of_the_config(name: str) -> None:
    config = json.loads((K3 / "model" / "config.json").read_text())
    config["text_config"] |= oracle_json("k3_tiny/golden")["report"]["variants"][name]["override"]
    model = openk3.load(K3 / "model", dtype=torch.float64, config=config, allow_unused=True)
    tokens, segments = flat(golden("k3_tiny")["full.input_ids"][:1])
    assert worst(model(tokens, segments).logits[None], golden("k3_tiny")[f"variant64.{name}.logits"]) < EXACT


def test_a_variant_that_leaves_tensors_unused_must_be_allowed_to() -> None:
    config = json.loads((K3 / "model" / "config.json").read_text())
    config["text_config"]["num_shared_experts"] = None
    with pytest.raises(UserError, match="does not use .*shared_experts"):
        openk3.load(K3 / "model", config=config)


def greedy(model: Decoder, prompts: list[list[int]], steps: int) -> tuple[list[list[int]], Tensor, DecoderState]:
    """Prefill, then one token at a time, all sequences in one ragged batch."""
    state = DecoderState.empty(model.config, sequences=len(prompts), dtype=model.dtype)
    tokens, segments = torch.tensor([t for p in prompts for t in p]), Segments.of(len(p) for p in prompts)
    chosen: list[list[int]] = [[] for _ in prompts]
    steps_logits = []
    for step in range(steps):
        logits = model(tokens, segments, state, logits="last").logits
        steps_logits.append(logits)
        tokens = logits.argmax(dim=1)
        segments = Segments.of([1] * len(prompts))
        for sequence, token in enumerate(tokens.tolist()):
            chosen[sequence].append(token)
        if step == steps - 1:
            break
    return chosen, torch.stack(steps_logits, dim=1), state


@torch.no_grad()
def test_greedy_generation_through_prefill_and_decode(k3_64: Decoder, k3_32: Decoder) -> None:
    g, report = golden("k3_tiny"), oracle_json("k3_tiny/golden")["report"]
    prompt = g["gen.prompt"][0].tolist()
    tokens, logits, state = greedy(k3_64, [prompt], 16)
    assert tokens == [report["gen"]["tokens"]]
    assert worst(logits, g["gen64.step_logits"]) < EXACT
    for layer, memory in enumerate(state.layers):
        if isinstance(memory, RecurrentMemory):
            assert worst(memory.recurrent.transpose(2, 3), g[f"gen.final_cache.{layer}.recurrent_state_vk"]) < 1e-4
    tokens, logits, _ = greedy(k3_32, [prompt], 16)
    assert tokens == [report["gen"]["tokens"]]
    assert worst(logits, g["gen.step_logits"]) < 2e-3


@torch.no_grad()
def test_prompts_of_different_lengths_in_one_batch(k3_64: Decoder) -> None:
    """The oracle pads on the left; a ragged batch has nothing to pad and gives the same numbers."""
    g = golden("k3_tiny")
    prompts = [g["genpad.prompt"][0].tolist(), g["genpad.prompt"][1, 7:].tolist()]
    tokens, logits, _ = greedy(k3_64, prompts, 16)
    assert tokens == oracle_json("k3_tiny/golden")["report"]["genpad"]["tokens"]
    assert worst(logits, g["genpad64.step_logits"]) < EXACT


@torch.no_grad()
def test_a_ragged_batch_equals_the_padded_oracle(k3_64: Decoder, k3_32: Decoder) -> None:
    g = golden("k3_tiny")
    rows = [g["padded.input_ids"][0], g["padded.input_ids"][1, 16:]]
    for model, key, tolerance in ((k3_64, "padded64", EXACT), (k3_32, "padded", 2e-3)):
        logits = model(torch.cat(rows), Segments.of([48, 32])).logits
        assert worst(logits[:48], g[f"{key}.logits"][0]) < tolerance
        assert worst(logits[48:], g[f"{key}.logits"][1, 16:]) < tolerance


@torch.no_grad()
def test_kimi_linear_in_float64() -> None:
    g = golden("kimi_linear_tiny_release")
    model = openk3.load(KIMI_LINEAR / "model", dtype=torch.float64)
    tokens, segments = flat(g["full.input_ids"])
    state = DecoderState.empty(model.config, sequences=2, dtype=torch.float64)
    weights: dict[int, Tensor] = {}
    log = RoutingLog(lambda layer, selection: weights.__setitem__(layer, selection.weights))
    out = model(tokens, segments, state, hidden_states=True, routing=log)
    assert worst(out.logits.view(2, 48, -1), g["full64.logits"]) < EXACT
    assert out.hidden_states is not None
    for layer in range(5):
        assert worst(out.hidden_states[layer + 1].view(2, 48, -1), g[f"full64.layer.{layer}.hidden"]) < EXACT
        memory = state.layers[layer]
        if isinstance(memory, RecurrentMemory):
            assert worst(memory.recurrent, g[f"full64.cache.{layer}.recurrent_state_kv"]) < EXACT
        if isinstance(memory, LatentMemory):
            held = torch.stack([memory.buffers[n][:48] for n in range(2)])
            expected = torch.cat([g[f"full.cache.{layer}.c_kv"], g[f"full.cache.{layer}.k_rope"]], dim=-1)[:, 0]
            assert worst(held, expected) < 1e-4
    for layer, ids in log.ids.items():
        assert torch.equal(ids.view(2, 48, -1), g[f"full.router.{layer}.indices"])
        assert worst(weights[layer].view(2, 48, -1), g[f"full64.router.{layer}.weights"]) < EXACT


@torch.no_grad()
def test_kimi_linear_in_fp32_and_greedy() -> None:
    g, report = golden("kimi_linear_tiny_release"), oracle_json("kimi_linear_tiny_release/golden")["report"]
    model = openk3.load(KIMI_LINEAR / "model")
    tokens, segments = flat(g["full.input_ids"])
    assert worst(model(tokens, segments).logits.view(2, 48, -1), g["full.logits"]) < 5e-4
    chosen, logits, _ = greedy(model, [g["gen.prompt"][0].tolist()], 16)
    assert chosen == [report["gen"]["tokens"]]
    assert worst(logits, g["gen.step_logits"]) < 5e-4


def test_every_float64_key_of_the_oracles_is_judged() -> None:
    judged = ("full64.", "genpad64.", "variant64.", "gen64.", "padded64.")
    keys: list[Any] = [key for name in ("k3_tiny", "kimi_linear_tiny_release") for key in golden(name) if "64." in key]
    assert keys and all(key.startswith(judged) for key in keys)
