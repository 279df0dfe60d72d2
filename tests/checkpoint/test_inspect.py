"""A check before any compute: everything wrong is found and named, nothing else, and damage never crashes it."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from openk3.checkpoint.inspect import inspect_checkpoint
from openk3.commands.inspect import main
from openk3.errors import UserError
from tests.support import ORACLES

RELEASE = ORACLES / "k3_tiny_mxfp4" / "model"
EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.3.w1.weight"
SECOND = "model-00002-of-000002.safetensors"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RELEASE, tmp_path / "c"))


def edit_tensor(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    for shard in directory.glob("*.safetensors"):
        tensors = load_file(shard)
        if name in tensors:
            changed = change(tensors.pop(name))
            if changed is not None:
                tensors[name] = changed
            save_file(tensors, shard)
            return
    raise AssertionError(name)


def test_sound_checkpoints() -> None:
    for name in ("k3_tiny", "k3_tiny_mxfp4", "kimi_linear_tiny_release"):
        found = inspect_checkpoint(ORACLES / name / "model", deep=True)
        assert found.sound and not found.warnings, (found.problems, found.warnings)
    assert inspect_checkpoint(RELEASE).facts["packed_matrices"] == 192


@pytest.mark.parametrize(
    ("name", "change", "complaint", "deep"),
    [
        (EXPERT + "_packed", lambda t: t[:, :-1].contiguous(), "has shape [64, 15], the config asks for [64, 16]", False),
        (EXPERT + "_scale", lambda t: None, "is not there", False),
        (EXPERT + "_scale", lambda t: t.float(), "stored as F32, not U8 or F8_E8M0", False),
        (EXPERT + "_scale", lambda t: t.fill_(255), "64 scale codes of 255", True),
        ("language_model.lm_head.weight", lambda t: t.to(torch.int8), "stored as I8", False),
        ("language_model.lm_head.weight", lambda t: t.float(), "stored as F32, most of the model", False),
        (
            "language_model.lm_head.weight",
            lambda t: t.index_fill(0, torch.tensor([3]), float("inf")),
            "64 values that are not finite",
            True,
        ),
        ("language_model.model.layers.0.self_attn.A_log", lambda t: t.index_fill(0, torch.tensor([99]), 1.0), "zero padding belongs", True),
    ],
)
def test_each_fault_is_named(copy: Path, name: str, change: Callable[..., torch.Tensor], complaint: str, deep: bool) -> None:
    edit_tensor(copy, name, change)
    found = inspect_checkpoint(copy, deep=deep)
    text = "\n".join(found.problems)
    assert complaint in text and name.removesuffix("_packed").removesuffix("_scale").split("model.")[-1] in text
    if deep:
        assert inspect_checkpoint(copy).sound, "headers alone cannot see it"


def test_everything_wrong_is_listed_at_once(copy: Path) -> None:
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    index["weight_map"]["ghost"] = SECOND
    del index["weight_map"]["language_model.model.norm.weight"]
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(copy / SECOND, copy / "model-extra.safetensors")
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["kv_lora_rank"] = 8
    (copy / "config.json").write_text(json.dumps(config))
    text = "\n".join(inspect_checkpoint(copy).problems)
    for complaint in ("places tensor ghost", "does not list", "model-extra.safetensors is not named", "kv_b_proj.weight has shape"):
        assert complaint in text


def test_the_verb(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(copy), "--deep"]) == 0
    assert "sound (headers and values)" in capsys.readouterr().out
    assert main(["--config", "k3", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["tensors"], facts["routed_matrices"], facts["stored_parameters"]) == (497220, 247296, 2779931837184)
    assert main(["--config", "k3"]) == 0
    assert "2,779,931,837,184" in capsys.readouterr().out
    (copy / SECOND).write_bytes((copy / SECOND).read_bytes()[:-100])
    assert main([str(copy), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["sound"] is False
    assert main([str(copy)]) == 1
    assert "is truncated" in capsys.readouterr().out
    for wrong in ([], [str(copy), "--config", "k3"], [str(copy / "no")], ["--config", "no-such"]):
        with pytest.raises(UserError):
            main(wrong)


def mutate(directory: Path, rng: random.Random) -> None:
    """Damage one file: a byte, a length, a value in the header, a value in the config, or the end of the file."""
    kind = rng.choice(["byte", "length", "header", "config", "index", "cut", "grow"])
    shard = rng.choice(sorted(directory.glob("*.safetensors")))
    content = bytearray(shard.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    if kind == "byte":
        content[rng.randrange(8 + length)] = rng.randrange(256)
    elif kind == "length":
        content[:8] = struct.pack("<Q", rng.choice([0, 1, length - 1, length + 1, 2**32, 2**63, 2**64 - 1]))
    elif kind == "cut":
        del content[rng.randrange(len(content)) :]
    elif kind == "grow":
        content += bytes(rng.randrange(1, 64))
    elif kind == "header":
        header = json.loads(content[8 : 8 + length])
        name = rng.choice(sorted(header))
        field = rng.choice(["dtype", "shape", "data_offsets"])
        value: object = rng.choice([None, -1, 2**70, [], [2**20, 2**20], [-1], ["x"], "F4", {}, [0, 0], 1.5, [[]], True])
        header[name] = value if rng.random() < 0.2 else {**header[name], field: value}
        text = json.dumps(header).encode()
        content = bytearray(struct.pack("<Q", len(text))) + text + content[8 + length :]
    else:
        file = directory / ("config.json" if kind == "config" else "model.safetensors.index.json")
        tree = json.loads(file.read_text())
        level = tree["text_config"] if kind == "config" and rng.random() < 0.8 else tree
        key = rng.choice(sorted(level))
        level[key] = rng.choice([None, -1, 0, 2**40, 1.5, "x", [], {}, [1], True, float("nan"), 200, 7])
        file.write_text(json.dumps(tree))
        return
    shard.write_bytes(content)


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 500), marks=pytest.mark.slow)], ids=["some", "all"])
def test_random_damage_is_never_a_crash(tmp_path: Path, seeds: range) -> None:
    noticed = 0
    for seed in seeds:
        directory = Path(shutil.copytree(RELEASE, tmp_path / str(seed)))
        rng = random.Random(seed)
        mutate(directory, rng)
        noticed += not inspect_checkpoint(directory).sound
        shutil.rmtree(directory)
    assert noticed > len(seeds) * 0.6
