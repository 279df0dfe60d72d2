"""A checkpoint with packed experts, as the release ships it: the reference's numbers from its own files, and the same bits as unpacked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import openk3
from openk3 import Decoder, DecoderState, Segments
from openk3.errors import UserError
from openk3.model.packed_experts import PackedExperts
from openk3.ops.mx import MXTensor
from tests.support import ORACLES, oracle_json, oracle_tensors, worst

PACKED = ORACLES / "k3_tiny_mxfp4" / "model"


def golden(key: str) -> Tensor:
    return oracle_tensors("k3_tiny_mxfp4/golden")[key]


def packed_experts(model: Decoder) -> list[PackedExperts]:
    return [module for module in model.modules() if isinstance(module, PackedExperts)]


@torch.no_grad()
def logits(model: Decoder, key: str = "full.input_ids") -> Tensor:
    ids = golden(key)
    return model(ids.flatten(), Segments.of([ids.shape[1]] * ids.shape[0])).logits.view(*ids.shape, -1)


def test_the_release_form_gives_the_release_numbers() -> None:
    model = openk3.load(PACKED, dtype=torch.float64)
    assert len(packed_experts(model)) == 8
    assert worst(logits(model), golden("full64.logits")) < 1e-9
    assert worst(logits(openk3.load(PACKED, dtype=torch.float32)), golden("full.logits")) < 2e-3
    stored = openk3.load(PACKED)
    assert stored.dtype == torch.bfloat16
    # The reference's own bfloat16 run is 0.30 away from its fp32 run on average, since near ties between experts fall either way.
    assert float((logits(stored).float() - golden("full.logits")).abs().mean()) < 0.6


@torch.no_grad()
def test_greedy_tokens_from_packed_files() -> None:
    model = openk3.load(PACKED, dtype=torch.float64)
    prompt = golden("gen.prompt")[0]
    state = DecoderState.empty(model.config, sequences=1, dtype=torch.float64)
    tokens, chosen, steps = prompt, [], []
    for _ in range(16):
        row = model(tokens, Segments.of([len(tokens)]), state, logits="last").logits
        steps.append(row)
        tokens = row.argmax(dim=1)
        chosen.append(int(tokens))
    assert chosen == oracle_json("k3_tiny_mxfp4/golden")["report"]["gen"]["tokens"] == golden("gen.tokens")[0].tolist()
    assert worst(torch.stack(steps, dim=1), golden("gen64.step_logits")) < 1e-9


def test_unpacked_values_are_the_reference_decoder_s() -> None:
    expected = load_file(ORACLES / "k3_tiny_mxfp4" / "dequant_layer1.safetensors")
    model = openk3.load(PACKED, dtype=torch.float32)
    experts = model.layers[1].mlp.experts
    w13 = MXTensor("mxfp4", experts.w13_packed, experts.w13_scale, 32).dequantize(torch.float32)
    w2 = MXTensor("mxfp4", experts.w2_packed, experts.w2_scale, 64).dequantize(torch.float32)
    for name, value in expected.items():
        expert, matrix = int(name.split(".experts.")[1].split(".")[0]), name.split(".")[-2]
        ours = {"w1": w13[expert, :64], "w3": w13[expert, 64:], "w2": w2[expert]}[matrix]
        assert torch.equal(ours, value), name


def rewrite(directory: Path, change: dict[str, Any]) -> Path:
    """The packed checkpoint as one file, with tensors replaced (None: taken out)."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted(PACKED.glob("*.safetensors")):
        tensors |= load_file(shard)
    for name, value in change.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text((PACKED / "config.json").read_text())
    return directory


ROOT = "language_model.model.layers.1.block_sparse_moe.experts."


def test_scales_of_either_dtype_and_plain_files_of_the_same_values(tmp_path: Path) -> None:
    model = openk3.load(PACKED, dtype=torch.float32)
    everything: dict[str, Tensor] = {}
    for shard in sorted(PACKED.glob("*.safetensors")):
        everything |= load_file(shard)
    scales = {name: t.view(torch.float8_e8m0fnu) for name, t in everything.items() if name.endswith("weight_scale")}
    assert torch.equal(logits(openk3.load(rewrite(tmp_path / "e8m0", scales), dtype=torch.float32)), logits(model))
    # The config still says packed; what is stored decides.
    plain: dict[str, Any] = {}
    for name, packed in everything.items():
        if name.endswith("weight_packed"):
            base = name.removesuffix("_packed")
            mx = MXTensor("mxfp4", packed, everything[f"{base}_scale"], packed.shape[1] * 2)
            plain |= {name: None, f"{base}_scale": None, base: mx.dequantize(torch.bfloat16)}
    unpacked = openk3.load(rewrite(tmp_path / "plain", plain), dtype=torch.float32)
    assert not packed_experts(unpacked)
    assert torch.equal(logits(unpacked), logits(model))


def test_inputs_in_mxfp8_are_other_arithmetic_and_must_be_asked_for() -> None:
    plain, rounded = (openk3.load(PACKED, dtype=torch.float32, expert_activations=kind) for kind in ("none", "mxfp8"))
    assert torch.equal(logits(openk3.load(PACKED, dtype=torch.float32)), logits(plain)), "the release states no activation format"
    # Single tokens may fall to other experts; most of them move by the rounding alone.
    typical = float((logits(rounded) - logits(plain)).abs().median())
    assert 1e-4 < typical < 0.5
    with pytest.raises(UserError, match="expert_activations"):
        openk3.load(PACKED, expert_activations="fp8")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({f"{ROOT}3.w1.weight_scale": None}, r"experts\.3\.w1\.weight_scale .* is not there"),
        ({f"{ROOT}3.w1.weight_packed": None}, r"experts\.3\.w1\.weight_packed .* is not there"),
        ({f"{ROOT}3.w1.weight_packed": torch.zeros(64, 15, dtype=torch.uint8)}, r"shape \[64, 15\], the config asks for \[64, 16\]"),
        ({f"{ROOT}3.w1.weight_scale": torch.ones(64, 1)}, "stored as F32, not U8 or F8_E8M0"),
        ({f"{ROOT}3.w1.weight": torch.zeros(64, 32)}, "are packed and 1 are plain"),
    ],
)
def test_packed_tensors_that_do_not_fit(change: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=complaint):
        openk3.load(rewrite(tmp_path / "c", change))


def test_an_activation_scheme_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    directory = rewrite(tmp_path / "c", {})
    config = json.loads((directory / "config.json").read_text())
    group = next(iter(config["text_config"]["quantization_config"]["config_groups"].values()))
    group["input_activations"] = {"num_bits": 8, "type": "float", "group_size": 128}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="is not MXFP8"):
        openk3.load(directory)
    assert openk3.load(directory, expert_activations="none").config.num_experts == 8
