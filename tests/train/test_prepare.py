"""From settings to tokens: what fits together, what does not, and that a failed preparation leaves nothing behind."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import openk3
from openk3 import ModelConfig
from openk3.errors import UserError
from openk3.text.tokenizer import Tokenizer
from openk3.train import plot, prepare
from openk3.train.config import TrainConfig
from openk3.train.loop import resume, train
from openk3.train.run import RunDirectory
from tests.train.runs import TINY, tiny, write_text


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than the runs."""
    monkeypatch.setattr(plot, "draw", lambda metrics, target: None)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    train(tiny(text, steps=2), run)
    return run


def with_model(config: TrainConfig, **overrides: Any) -> TrainConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, overrides={**TINY, **overrides}))


def refusal(config: TrainConfig, run: Path) -> str:
    with pytest.raises(UserError) as error:
        train(config, run)
    assert not run.exists(), "a refused run leaves nothing behind"
    assert "\n" not in str(error.value)
    return str(error.value)


def test_nothing_says_auto_any_more() -> None:
    config, model, tokenizer = prepare.resolve(TrainConfig())
    assert config.compute.device in ("cpu", "cuda") and config.compute.precision in ("fp32", "bf16-autocast")
    assert (config.compute.threads or 0) >= 1 and config.model.name == "nano"
    assert model == ModelConfig.named("nano") and tokenizer is None
    assert prepare.resolve(config)[0] == config


@pytest.mark.parametrize(
    ("able", "precision"), [({}, "fp32"), ({"amx_bf16": True}, "bf16-autocast"), ({"avx512_bf16": True}, "bf16-autocast")]
)
def test_bf16_only_where_the_cpu_multiplies_it(monkeypatch: pytest.MonkeyPatch, able: dict[str, bool], precision: str) -> None:
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: able)
    assert prepare.resolve(tiny(Path("x"), precision="auto"))[0].compute.precision == precision


def test_a_gpu_that_is_not_there() -> None:
    if prepare.torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UserError, match=r"compute.device is cuda, but this machine has no GPU"):
        prepare.resolve(tiny(Path("x"), device="cuda"))


def test_the_tokenizer_has_the_size_that_is_asked_for(text: Path, tmp_path: Path) -> None:
    train(with_model(tiny(text, steps=1, vocab_size=280), vocab_size=320), tmp_path / "padded")
    assert Tokenizer.load(tmp_path / "padded").vocab_size == 280 and openk3.load(tmp_path / "padded").config.vocab_size == 320
    config = tiny(text, steps=1, vocab_size=290)
    overrides = {name: value for name, value in TINY.items() if name != "vocab_size"}
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, overrides=overrides))
    train(config, tmp_path / "own")
    model = openk3.load(tmp_path / "own").config
    assert (model.vocab_size, model.bos_token_id) == (290, 283)


def test_a_tokenizer_that_is_there_is_used(text: Path, trained: Path, tmp_path: Path) -> None:
    train(tiny(text, steps=1, tokenizer=str(trained)), tmp_path / "run")
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (trained / "tokenizer.json").read_bytes()
    assert "has 300 tokens, more than the model's vocab_size=290" in refusal(
        with_model(tiny(text, tokenizer=str(trained)), vocab_size=290), tmp_path / "small"
    )
    assert "data.tokenizer and data.vocab_size are both given" in _config_refusal(text, tokenizer="x", vocab_size=300)


def _config_refusal(text: Path, **changes: Any) -> str:
    with pytest.raises(UserError) as error:
        tiny(text, **changes)
    return str(error.value)


def test_going_on_from_weights(text: Path, trained: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(tiny(text, steps=2), model=dataclasses.replace(tiny(text).model, name=None, overrides={}))
    config = dataclasses.replace(config, start_from=str(trained))
    result = train(config, tmp_path / "next")
    assert result.step == 2
    assert (tmp_path / "next" / "tokenizer.json").read_bytes() == (trained / "tokenizer.json").read_bytes()
    first = openk3.load(tmp_path / "next" / "checkpoints" / "step-00000000").state_dict()
    before = openk3.load(trained).state_dict()
    assert all((first[name] == tensor).all() for name, tensor in before.items())
    # Exactly this checkpoint, whatever else is written into that run later.
    assert TrainConfig.from_toml(tmp_path / "next" / "config.toml").start_from == str((trained / "checkpoints" / "step-00000002").resolve())


def test_a_run_from_weights_goes_on_when_the_weights_have_gone(text: Path, trained: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(trained, tmp_path / "source")
    config = dataclasses.replace(tiny(text, steps=2), model=dataclasses.replace(tiny(text).model, name=None, overrides={}))
    run = tmp_path / "next"
    train(dataclasses.replace(config, start_from=str(tmp_path / "source")), run)
    shutil.rmtree(tmp_path / "source")
    assert resume(run, steps=3).step == 3


def test_tokenizer_and_checkpoint_that_disagree(text: Path, trained: Path, tmp_path: Path) -> None:
    base = dataclasses.replace(tiny(text, steps=1), model=dataclasses.replace(tiny(text).model, name=None, overrides={}))
    Tokenizer.train(["other text " * 40], 300).save(tmp_path / "other")
    other = dataclasses.replace(base, start_from=str(trained), data=dataclasses.replace(base.data, tokenizer=str(tmp_path / "other")))
    assert "is not the one that" in refusal(other, tmp_path / "a")
    sized = dataclasses.replace(base, start_from=str(trained), data=dataclasses.replace(base.data, vocab_size=300))
    assert "data.vocab_size asks for a new tokenizer" in refusal(sized, tmp_path / "b")

    bare = tmp_path / "bare"
    openk3_checkpoint = trained / "checkpoints" / "step-00000002"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((openk3_checkpoint / name).read_bytes())
    alone = dataclasses.replace(base, start_from=str(bare))
    assert "has no tokenizer.json beside it: name the tokenizer it was trained with" in refusal(alone, tmp_path / "c")
    Tokenizer.train(["other text " * 40], 310).save(tmp_path / "larger")
    larger = dataclasses.replace(alone, data=dataclasses.replace(alone.data, tokenizer=str(tmp_path / "larger")))
    assert "the tokenizer has 310 tokens, the model of" in refusal(larger, tmp_path / "d")
    Tokenizer.train(["other text " * 40], 290).save(tmp_path / "smaller")
    smaller = dataclasses.replace(alone, data=dataclasses.replace(alone.data, tokenizer=str(tmp_path / "smaller")))
    assert "token 283 begins a text for the tokenizer, token 293 for the model of" in refusal(smaller, tmp_path / "e")


def test_a_model_and_weights_are_not_both_named(text: Path, trained: Path) -> None:
    with pytest.raises(UserError, match=r"the model comes from .*: leave out its name and its fields"):
        dataclasses.replace(tiny(text), start_from=str(trained))


def test_a_run_whose_tokenizer_was_exchanged(trained: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(trained, tmp_path / "run")
    Tokenizer.train(["other text " * 40], 300).save(tmp_path / "run")
    with RunDirectory.open(tmp_path / "run") as run, pytest.raises(UserError, match="was written with another tokenizer"):
        prepare.reopen(run.settings(), run)


def test_packed_and_json_lines_texts(text: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": file.read_text()}) for file in sorted(text.iterdir())]
    packed = tmp_path / "texts.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(lines).encode()))
    train(tiny(packed, steps=2), tmp_path / "packed")
    train(tiny(text, steps=2), tmp_path / "plain")
    assert (tmp_path / "packed/tokens/texts.bin").read_bytes() == (tmp_path / "plain/tokens/texts.bin").read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", b"", "no text in"),
        ("a.txt", b"some text \x00\x01 more", "zero byte"),
        ("a.txt", b"caf\xe9 " * 50, "not UTF-8"),
        ("a.txt", b"a few words", "less than one batch|cannot be divided|cannot be held out"),
        ("a.txt", b"a few words more than that " * 10, "less than one batch of 96"),
        ("a.jsonl", b'{"body": "x"}\n', 'no "text"'),
        ("a.jsonl", b'{"text": \n', "not JSON"),
        ("a.txt.gz", b"no gzip at all", "damaged"),
    ],
)
def test_a_text_that_cannot_be_used_is_named_and_nothing_is_left(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    import re

    assert re.search(said, message := refusal(tiny(tmp_path / name), tmp_path / "run")), message
    assert name in message or "texts.bin" in message


def test_no_text_and_no_end_are_said(tmp_path: Path, text: Path) -> None:
    assert "does not exist" in refusal(tiny(tmp_path / "none.txt"), tmp_path / "run")
    assert refusal(tiny(text, paths=()), tmp_path / "run") == "no text was named: give files or directories to train on"
    assert "give --steps, --minutes or --tokens" in refusal(tiny(text, steps=None), tmp_path / "run")


def test_a_refused_run_leaves_an_existing_directory_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        train(tiny(write_text(tmp_path / "text")), tmp_path / "keep")
    assert (tmp_path / "keep" / "notes.txt").read_text() == "mine"
