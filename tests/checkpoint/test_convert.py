"""From one precision to another: untouched where nothing changes, bit-equal where something does, whole or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import openk3
from openk3 import Decoder, ModelConfig, Segments
from openk3.checkpoint.convert import convert
from openk3.checkpoint.inspect import inspect_checkpoint
from openk3.checkpoint.quantization import IGNORED, block, with_block
from openk3.checkpoint.save import save_release
from openk3.errors import UserError
from openk3.model.qat import set_quantization
from tests.support import ORACLES

RELEASE = ORACLES / "k3_tiny_mxfp4" / "model"
PLAIN = ORACLES / "k3_tiny" / "model"


def stored(directory: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(shard)
    return tensors


def digests(directory: Path) -> dict[str, str]:
    return {
        name: hashlib.sha256(t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest() + f" {t.dtype} {tuple(t.shape)}"
        for name, t in stored(directory).items()
    }


@torch.no_grad()
def logits(model: Decoder) -> Tensor:
    return model(torch.arange(40), Segments.of([25, 15])).logits


def test_a_release_passes_through_byte_for_byte(tmp_path: Path) -> None:
    done = convert(RELEASE, tmp_path / "copy", "mxfp4", shard_bytes=500_000)
    assert done.packed == done.unpacked == 0 and done.passed == done.tensors == 630
    assert digests(tmp_path / "copy") == digests(RELEASE)
    ours, theirs = (json.loads((d / "config.json").read_text())["text_config"]["quantization_config"] for d in (tmp_path / "copy", RELEASE))
    assert ours == theirs
    assert inspect_checkpoint(tmp_path / "copy", deep=True).sound


def test_unpacked_and_packed_again_it_is_the_same(tmp_path: Path) -> None:
    convert(RELEASE, tmp_path / "bf16", "bf16")
    plain = stored(tmp_path / "bf16")
    assert not any(name.endswith(("_packed", "_scale")) for name in plain)
    assert "quantization_config" not in (tmp_path / "bf16" / "config.json").read_text()
    assert torch.equal(logits(openk3.load(tmp_path / "bf16")), logits(openk3.load(RELEASE)))
    convert(tmp_path / "bf16", tmp_path / "again", "mxfp4")
    # A block whose largest code is 3 was scaled by another rule; values, not codes, must come back.
    again = openk3.load(tmp_path / "again")
    assert torch.equal(logits(again), logits(openk3.load(RELEASE)))
    vision = {name for name in plain if name.startswith(("vision", "mm_"))}
    assert len(vision) == 12 and vision <= stored(tmp_path / "again").keys()


def test_dtypes_of_the_trunk(tmp_path: Path) -> None:
    convert(PLAIN, tmp_path / "keep", "mxfp4")
    convert(PLAIN, tmp_path / "cast", "mxfp4", trunk="bf16")
    convert(PLAIN, tmp_path / "bf16", "bf16")
    kept, cast, plain = (stored(tmp_path / name) for name in ("keep", "cast", "bf16"))
    name = "language_model.model.layers.1.self_attn.q_proj.weight"
    assert (kept[name].dtype, cast[name].dtype, plain[name].dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    for tensors in (kept, cast, plain):
        assert tensors["language_model.model.layers.1.self_attn.A_log"].dtype == torch.float32
        assert tensors["vision_tower.encoder.blocks.0.norm0.weight"].dtype == torch.float32, "what is not ours is not touched"
    assert json.loads((tmp_path / "cast" / "config.json").read_text())["text_config"]["dtype"] == "bfloat16"
    assert inspect_checkpoint(tmp_path / "cast", deep=True).warnings == []


def qat_model() -> Decoder:
    config = ModelConfig.named("debug13").replace(latent_size=32, moe_intermediate_size=32)
    model = Decoder(config, generator=torch.Generator().manual_seed(0)).eval()
    set_quantization(model, "floor", "mxfp8")
    model.config = with_block(config, block("mxfp8", trained_under="floor"))
    return model


def test_what_training_sees_and_what_export_writes_are_bit_equal(tmp_path: Path) -> None:
    model = qat_model()
    save_release(model, tmp_path / "run")
    assert torch.equal(logits(openk3.load(tmp_path / "run")), logits(model)), "a checkpoint of the run itself keeps its arithmetic"
    convert(tmp_path / "run", tmp_path / "exported", "mxfp4")
    exported = openk3.load(tmp_path / "exported")
    assert torch.equal(logits(exported), logits(model))
    for layer, reference in zip(exported.layers[1:], model.layers[1:], strict=True):
        experts, masters = layer.mlp.experts, reference.mlp.experts
        assert experts.inputs == "mxfp8"
        for name in ("w13", "w2"):
            unpacked = openk3.ops.mx.MXTensor("mxfp4", getattr(experts, f"{name}_packed"), getattr(experts, f"{name}_scale"), 32)
            assert torch.equal(unpacked.dequantize(torch.float32), masters._seen(getattr(masters, name)))
    plain = openk3.load(tmp_path / "exported", expert_activations="none")
    assert not torch.equal(logits(plain), logits(model))
    group = json.loads((tmp_path / "exported" / "config.json").read_text())["text_config"]["quantization_config"]
    assert group["quantization_status"] == "compressed" and "scale_rule" not in group
    assert group["config_groups"]["group_0"]["input_activations"]["group_size"] == 32
    # Saved from memory, the packed model is the same files.
    save_release(exported, tmp_path / "saved")
    assert digests(tmp_path / "saved") == digests(tmp_path / "exported")


def test_the_ignore_list_names_every_linear_layer_that_stays_plain(tmp_path: Path) -> None:
    import re

    convert(PLAIN, tmp_path / "c", "mxfp4")
    patterns = [re.compile(pattern.removeprefix("re:")) for pattern in IGNORED]
    for name, tensor in stored(tmp_path / "c").items():
        module = name.rsplit(".", 1)[0]
        ignored = any(pattern.match(module) for pattern in patterns)
        if name.endswith(("weight_packed", "weight_scale")):
            assert not ignored, name
        elif tensor.dim() == 2 and name.endswith(".weight") and "embed_tokens" not in name:
            assert ignored, name


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    with pytest.raises(UserError, match="not empty"):
        convert(PLAIN, tmp_path / "full", "bf16")
    with pytest.raises(UserError, match="bf16 or mxfp4"):
        convert(PLAIN, tmp_path / "new", "fp8")  # type: ignore[arg-type]
    save_release(Decoder(ModelConfig.named("debug13").replace(latent_size=24)), tmp_path / "narrow")
    with pytest.raises(UserError, match="24 columns, which MXFP4 cannot pack"):
        convert(tmp_path / "narrow", tmp_path / "new", "mxfp4")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("openk3.checkpoint.convert.write_checkpoint", full)
    with pytest.raises(UserError, match="No space left"):
        convert(PLAIN, tmp_path / "new", "bf16")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["full", "narrow"]
