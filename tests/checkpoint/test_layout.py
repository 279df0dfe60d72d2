"""Release-layout files: read from any prefix, written back the same, and refused with a reason when something is wrong."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import openk3
from openk3 import Decoder, ModelConfig, Segments
from openk3.checkpoint.load import locate
from openk3.checkpoint.names import canonical, entries
from openk3.checkpoint.save import save_release
from openk3.errors import UserError
from tests.support import ORACLES

K3 = ORACLES / "k3_tiny" / "model"
KIMI_LINEAR = ORACLES / "kimi_linear_tiny_release" / "model"


def write(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def original(source: Path = K3) -> tuple[dict[str, Tensor], dict[str, Any]]:
    return load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())


@torch.no_grad()
def logits(model: Decoder) -> Tensor:
    return model(torch.arange(30), Segments.of([20, 10])).logits


@pytest.mark.parametrize("name", ["debug13", "nano", "mini"])
def test_the_table_covers_every_parameter_exactly_once(name: str) -> None:
    for config in (
        ModelConfig.named(name),
        ModelConfig.named(name).replace(tie_word_embeddings=True, num_shared_experts=0, latent_norm=False),
    ):
        with torch.device("meta"):
            model = Decoder(config)
        own = {n: p.numel() for n, p in [*model.named_parameters(), *model.named_buffers()]}
        table = list(entries(config))
        assert sorted(entry.ours for entry in table) == sorted(own)
        for entry in table:
            if not entry.ours.endswith("A_log"):
                assert sum(torch.Size(part.shape).numel() for part in entry.parts) == own[entry.ours], entry.ours


@pytest.mark.parametrize("source", [K3, KIMI_LINEAR], ids=["k3", "kimi-linear"])
def test_what_is_read_is_written_back_the_same(source: Path, tmp_path: Path) -> None:
    before, _ = original(source)
    save_release(openk3.load(source), tmp_path)
    after = load_file(tmp_path / "model.safetensors")
    text = {name: t for name, t in before.items() if not name.startswith(("vision_tower", "mm_projector"))}
    assert after.keys() == text.keys()
    for name, tensor in text.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
    assert torch.equal(logits(openk3.load(tmp_path)), logits(openk3.load(source)))


def test_shards_and_index(tmp_path: Path) -> None:
    model = openk3.load(K3)
    files = save_release(model, tmp_path, shard_bytes=400_000)
    assert len(files) > 5 and (tmp_path / "model.safetensors.index.json").is_file()
    assert torch.equal(logits(openk3.load(tmp_path)), logits(model))


def test_dtypes(tmp_path: Path) -> None:
    save_release(openk3.load(K3, dtype=torch.bfloat16), tmp_path)
    stored = {name: t.dtype for name, t in load_file(tmp_path / "model.safetensors").items()}
    wide = {name for name, dtype in stored.items() if dtype == torch.float32}
    islands = ("A_log", "dt_bias", "_conv1d.weight", "o_norm.weight", "e_score_correction_bias")
    assert wide == {name for name in stored if name.endswith(islands)}
    assert set(stored.values()) == {torch.float32, torch.bfloat16}
    model = openk3.load(tmp_path)
    assert model.dtype == torch.bfloat16 and not model.training
    assert openk3.load(tmp_path, dtype=torch.float64).layers[0].attn.A_log.dtype == torch.float64


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.", ""])
def test_every_prefix(prefix: str, tmp_path: Path) -> None:
    tensors, config = original()
    renamed = {}
    for name, tensor in tensors.items():
        short = canonical(name)
        if short == "lm_head.weight":
            renamed[prefix.removesuffix("model.") + short] = tensor
        else:
            renamed[name if name.startswith(("vision", "mm_")) else prefix + short] = tensor
    assert torch.equal(logits(openk3.load(write(tmp_path, renamed, config))), logits(openk3.load(K3)))


def test_names_of_a_compiled_model_and_of_transformers(tmp_path: Path) -> None:
    tensors, config = original(KIMI_LINEAR)
    renamed = {}
    for name, tensor in tensors.items():
        name = name.replace("layers.0.mlp.", "layers.0.block_sparse_moe.").replace("model.layers.1.", "model._orig_mod.layers.1.")
        renamed[name] = tensor
    assert torch.equal(logits(openk3.load(write(tmp_path, renamed, config))), logits(openk3.load(KIMI_LINEAR)))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_tied_flag_against_stored_head(tied: bool, head: str, tmp_path: Path) -> None:
    tensors, config = original()
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = tied
    name = "language_model.lm_head.weight"
    if head == "absent":
        del tensors[name]
    elif head == "equal":
        tensors[name] = tensors["language_model.model.embed_tokens.weight"].clone()
    directory = write(tmp_path, tensors, config)
    if tied and head == "different":
        with pytest.raises(UserError, match="ties the head"):
            openk3.load(directory)
    elif not tied and head == "absent":
        with pytest.raises(UserError, match=r"the tensor lm_head\.weight .* is not there"):
            openk3.load(directory)
    else:
        model = openk3.load(directory)
        assert (model.head.weight.data_ptr() == model.embed.weight.data_ptr()) == tied


def damage(name: str) -> Callable[[dict[str, Tensor], dict[str, Any]], None]:
    key = "language_model.model.layers.1.self_attn."

    def missing(t: dict[str, Tensor], c: dict[str, Any]) -> None:
        del t[key + "q_proj.weight"]

    def shape(t: dict[str, Tensor], c: dict[str, Any]) -> None:
        t[key + "q_proj.weight"] = t[key + "q_proj.weight"][:, :-1]

    def integer(t: dict[str, Tensor], c: dict[str, Any]) -> None:
        t[key + "q_proj.weight"] = t[key + "q_proj.weight"].to(torch.int32)

    def tail(t: dict[str, Tensor], c: dict[str, Any]) -> None:
        t[key + "A_log"][100] = 1.0

    def leftover(t: dict[str, Tensor], c: dict[str, Any]) -> None:
        t["language_model.model.layers.9.input_layernorm.weight"] = torch.ones(64)

    def twice(t: dict[str, Tensor], c: dict[str, Any]) -> None:
        t["model.norm.weight"] = torch.ones(64)

    return {"missing": missing, "shape": shape, "integer": integer, "tail": tail, "leftover": leftover, "twice": twice}[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", r"the tensor layers\.1\.self_attn\.q_proj\.weight .* is not there"),
        ("shape", r"q_proj\.weight has shape \[64, 63\], the config asks for \[64, 64\]"),
        ("integer", "stored as I32"),
        ("tail", "values after the 4 heads"),
        ("leftover", r"does not use .*layers\.9\.input_layernorm"),
        ("twice", r"norm\.weight is stored twice"),
    ],
)
def test_tensors_that_do_not_fit(name: str, message: str, tmp_path: Path) -> None:
    tensors, config = original()
    damage(name)(tensors, config)
    with pytest.raises(UserError, match=message):
        openk3.load(write(tmp_path, tensors, config))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_release(openk3.load(K3), tmp_path / "c", shard_bytes=1_500_000)
    assert len(list((tmp_path / "c").glob("*.safetensors"))) == 3
    return tmp_path / "c"


def test_files_that_do_not_fit(sharded: Path) -> None:
    def refused(message: str, change: Callable[[Path], None]) -> None:
        copy = sharded.parent / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(sharded, copy)
        change(copy)
        with pytest.raises(UserError, match=message):
            openk3.load(copy)

    second = "model-00002-of-00003.safetensors"

    def edit_index(copy: Path, edit: Callable[[dict[str, str]], None]) -> None:
        index = json.loads((copy / "model.safetensors.index.json").read_text())
        edit(index["weight_map"])
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))

    def cut(copy: Path) -> None:
        content = (copy / second).read_bytes()
        (copy / second).write_bytes(content[:-7])

    def header(copy: Path) -> None:
        content = bytearray((copy / second).read_bytes())
        content[0:8] = struct.pack("<Q", 2**62)
        (copy / second).write_bytes(content)

    refused("which is not there", lambda copy: (copy / second).unlink())
    refused("is not named by", lambda copy: shutil.copy(copy / second, copy / "model-extra.safetensors") and None)
    refused("places tensor ghost", lambda copy: edit_index(copy, lambda m: m.__setitem__("ghost", second)))
    refused("does not list", lambda copy: edit_index(copy, lambda m: m.pop("language_model.model.norm.weight") and None))
    refused("but it is in", lambda copy: edit_index(copy, lambda m: m.__setitem__("language_model.model.norm.weight", second)))
    refused("is truncated", cut)
    refused("not a safetensors file, or is truncated", header)
    refused("bytes after its last tensor", lambda copy: (copy / second).open("ab").write(b"12345678") and None)
    refused("cannot be read", lambda copy: (copy / "model.safetensors.index.json").write_text("{") and None)


def test_places_that_hold_no_model(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "no", "does not exist"), (tmp_path, "no config.json"), (K3 / "config.json", "is a file")):
        with pytest.raises(UserError, match=message):
            openk3.load(path)
    (tmp_path / "checkpoints" / "step-00000003").mkdir(parents=True)
    with pytest.raises(UserError, match="without a complete checkpoint"):
        openk3.load(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "config.json").write_text((K3 / "config.json").read_text())
    with pytest.raises(UserError, match=r"holds no model\*\.safetensors"):
        openk3.load(tmp_path)


def test_a_run_directory_means_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    for step in (5, 40, 300):
        shutil.copytree(K3, tmp_path / "checkpoints" / f"step-{step:08d}")
    (tmp_path / "checkpoints" / "step-00000999.tmp").mkdir()
    (tmp_path / "checkpoints" / "step-00001000").mkdir()
    assert locate(tmp_path).name == "step-00000300"
    assert torch.equal(logits(openk3.load(tmp_path)), logits(openk3.load(K3)))


def test_arguments_of_load_that_are_not_what_they_should_be() -> None:
    for arguments, complaint in (
        ((K3, "float32"), "not 'float32'"),
        ((K3, torch.int64), "floating-point dtype"),
        ((3, None), "not by int"),
    ):
        with pytest.raises(UserError, match=complaint):
            openk3.load(arguments[0], dtype=arguments[1])  # type: ignore[arg-type]
