"""Checkpoints: what is written is read back bit for bit, damage is seen, and a save that fails takes nothing with it."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import openk3
from openk3 import Decoder, ModelConfig
from openk3.errors import UserError
from openk3.train import checkpointing
from openk3.train.checkpointing import Checkpoint, listed, newest_good, save
from openk3.train.run import TEMPORARY


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(ModelConfig.named("debug13"), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def companion(tmp_path: Path) -> Path:
    file = tmp_path / "tokenizer.json"
    file.write_text('{"a": 1}')
    return file


STATE: dict[str, Any] = {
    "step": 3,
    "rng": torch.arange(5, dtype=torch.uint8),
    "nested": {"losses": [1.5, float("inf")], "name": "x", "none": None},
}


def store(directory: Path, model: Decoder, companion: Path, step: int, keep: int = 2) -> Checkpoint:
    directory.mkdir(exist_ok=True)
    return save(directory, step, model, [companion], STATE, keep)


def test_it_holds_weights_tokenizer_and_state(tmp_path: Path, model: Decoder, companion: Path) -> None:
    checkpoint = store(tmp_path / "checkpoints", model, companion, 3)
    assert checkpoint.path.name == "step-00000003" and checkpoint.verify() is None
    loaded = openk3.load(checkpoint.path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
    assert (checkpoint.path / "tokenizer.json").read_text() == '{"a": 1}'
    state = checkpoint.training_state()
    assert torch.equal(state.pop("rng"), STATE["rng"]) and state == {key: value for key, value in STATE.items() if key != "rng"}
    assert not list(tmp_path.rglob(f"{TEMPORARY}*"))


def test_only_the_newest_are_kept(tmp_path: Path, model: Decoder, companion: Path) -> None:
    for step in (1, 2, 100000000):
        store(tmp_path / "checkpoints", model, companion, step)
    assert [checkpoint.step for checkpoint in listed(tmp_path / "checkpoints")] == [2, 100000000]
    assert {entry.name for entry in (tmp_path / "checkpoints").iterdir()} == {"step-00000002", "step-100000000"}


def truncate(file: Path) -> None:
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 7)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: truncate(path / "model.safetensors"), "model.safetensors has .* bytes, not .*: it is truncated"),
        (lambda path: truncate(path / "training.pt"), "training.pt has .* bytes, not .*: it is truncated"),
        (lambda path: flip(path / "model.safetensors"), "the content of model.safetensors is damaged"),
        (lambda path: flip(path / "training.pt"), "the content of training.pt is damaged"),
        (lambda path: (path / "training.pt").unlink(), "training.pt is missing"),
        (lambda path: (path / "manifest.json").unlink(), "manifest.json is missing"),
        (lambda path: truncate(path / "manifest.json"), "manifest.json is damaged"),
        (lambda path: (path / "manifest.json").write_text('{"files": []}'), "manifest.json is damaged"),
        (lambda path: (path / "manifest.json").write_text('{"files": {}}'), "manifest.json does not list training.pt"),
    ],
)
def test_damage_is_seen_and_the_one_before_is_used(tmp_path: Path, model: Decoder, companion: Path, harm: Any, said: str) -> None:
    directory = tmp_path / "checkpoints"
    for step in (1, 2):
        store(directory, model, companion, step)
    harm(directory / "step-00000002")
    good, complaints = newest_good(directory)
    assert good == Checkpoint(directory / "step-00000001", 1)
    assert len(complaints) == 1
    with pytest.raises(UserError, match=rf"step-00000002: {said}"):
        raise UserError(complaints[0])


def test_a_damaged_one_is_written_again(tmp_path: Path, model: Decoder, companion: Path) -> None:
    directory = tmp_path / "checkpoints"
    store(directory, model, companion, 1)
    truncate(directory / "step-00000001" / "training.pt")
    assert newest_good(directory)[0] is None
    assert store(directory, model, companion, 1).verify() is None
    assert [entry.name for entry in directory.iterdir()] == ["step-00000001"]


def test_a_state_with_code_in_it_is_not_run(tmp_path: Path, model: Decoder, companion: Path) -> None:
    checkpoint = store(tmp_path / "checkpoints", model, companion, 1)
    torch.save({"step": Path("x")}, checkpoint.path / "training.pt")
    with pytest.raises(UserError, match=r"training.pt cannot be read"):
        checkpoint.training_state()


def full_disk(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("where", ["save_release", "torch.save", "shutil.copyfile", "_sync", "sync_directory", "os.rename"])
def test_a_full_disk_leaves_the_last_checkpoint(
    tmp_path: Path, model: Decoder, companion: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    directory = tmp_path / "checkpoints"
    store(directory, model, companion, 1)
    with monkeypatch.context() as patch:
        owner, _, name = where.rpartition(".")
        patch.setattr({"torch": torch, "shutil": shutil, "os": os}.get(owner, checkpointing), name, full_disk)
        with pytest.raises(UserError) as error:
            store(directory, model, companion, 2)
    assert str(error.value) == (
        f"the checkpoint of step 2 could not be written to {directory}: No space left on device; make room and resume; "
        "the checkpoint of step 1 is whole"
    )
    assert [entry.name for entry in directory.iterdir()] == ["step-00000001"]
    assert newest_good(directory) == (Checkpoint(directory / "step-00000001", 1), [])
    assert store(directory, model, companion, 2).verify() is None


@pytest.mark.parametrize("room", [100_000, 1_000, 10])
def test_a_file_that_the_system_refuses_to_grow(tmp_path: Path, model: Decoder, companion: Path, room: int) -> None:
    """No pretence: the kernel itself cuts the writes of safetensors, of torch and of Python short."""
    directory = tmp_path / "checkpoints"
    store(directory, model, companion, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert (directory / "step-00000001" / "model.safetensors").stat().st_size > room
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(
            UserError, match=r"step 2 could not be written to .*: File too large; make room and resume; the checkpoint of step 1 is whole"
        ):
            store(directory, model, companion, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [entry.name for entry in directory.iterdir()] == ["step-00000001"]


def test_torch_cut_short_by_the_system(tmp_path: Path, model: Decoder, companion: Path) -> None:
    directory = tmp_path / "checkpoints"
    store(directory, model, companion, 1)
    largest = max(file.stat().st_size for file in (directory / "step-00000001").iterdir())
    state = {**STATE, "momentum": torch.zeros(largest)}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest + 1000, before[1]))
    try:
        with pytest.raises(
            UserError, match=r"could not be written to .*: File too large; make room and resume; the checkpoint of step 1 is whole"
        ):
            save(directory, 2, model, [companion], state, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [entry.name for entry in directory.iterdir()] == ["step-00000001"]


def test_a_fault_of_our_own_is_not_called_a_full_disk(
    tmp_path: Path, model: Decoder, companion: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir()

    def fault(*_: object) -> None:
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(checkpointing, "save_release", fault)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        save(directory, 1, model, [companion], STATE, 2)
    assert not list(directory.iterdir())
