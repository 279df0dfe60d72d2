"""Quantization-aware training: what is trained is what is exported is what is served, and a run with it goes on exactly."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import openk3
from openk3 import Decoder, Segments
from openk3.checkpoint.convert import convert
from openk3.commands.sft import main as sft
from openk3.errors import UserError
from openk3.model.moe import Experts
from openk3.train.config import TrainConfig
from openk3.train.evaluate import evaluate_part
from openk3.train.loop import RunResult, resume, train
from openk3.train.prepare import reopen
from openk3.train.run import RunDirectory
from tests.train.runs import TINY, fingerprint, tiny, write_text

WIDE = {**TINY, "latent_size": 32, "moe_intermediate_size": 32}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResult, TrainConfig]:
    root = tmp_path_factory.mktemp("base")
    config = tiny(write_text(root / "text"), steps=6, overrides=WIDE)
    return train(config, root / "run"), config


def chats(path: Path, count: int = 30) -> str:
    with path.open("w") as file:
        for n in range(count):
            user, assistant = {"role": "user", "content": f"alpha {n % 5}"}, {"role": "assistant", "content": f"beta {n % 5} gamma"}
            file.write(json.dumps({"messages": [user, assistant], "thinking": False}) + "\n")
    return str(path)


def fine_tune(base: tuple[RunResult, TrainConfig], root: Path, name: str, *flags: str) -> Path:
    source = root / "chats.jsonl"
    if not source.exists():
        chats(source)
    settings = [
        "--steps",
        "4",
        "--data.tokens-per-batch",
        "96",
        "--data.sequence-length",
        "96",
        "--compute.threads",
        "1",
        "--data.heldout",
        "0.2",
    ]
    assert sft([str(source), "--from", str(base[0].run), "--out", str(root / name), "--quiet", *settings, *flags]) == 0
    return root / name


@torch.no_grad()
def logits(model: Decoder) -> torch.Tensor:
    return model(torch.arange(30), Segments.of([20, 10])).logits


def heldout(run: Path, model: Decoder) -> float:
    with RunDirectory.open(run) as directory:
        prepared = reopen(directory.settings(), directory)
        assert prepared.heldout is not None
        return evaluate_part(model, prepared.heldout, tokens_per_batch=96, sequence_length=96).loss


def test_fine_tuning_rounds_by_default_and_exports_what_it_trained(base: tuple[RunResult, TrainConfig], tmp_path: Path) -> None:
    run = fine_tune(base, tmp_path, "chat", "--quantization.scale-rule", "ceil")
    trained = openk3.load(run)
    experts = [module for module in trained.modules() if isinstance(module, Experts)]
    assert len(experts) == 2 and {(e.weight_rule, e.inputs) for e in experts} == {("ceil", "mxfp8")}
    convert(run, tmp_path / "exported", "mxfp4")
    exported = openk3.load(tmp_path / "exported")
    assert torch.equal(logits(exported), logits(trained))
    assert heldout(run, exported) == pytest.approx(heldout(run, trained), abs=1e-6)
    last = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()][-1]
    assert heldout(run, trained) == pytest.approx(last["heldout"], abs=1e-6), "what training measured is what the checkpoint computes"


def test_without_rounding_it_is_plain_training(base: tuple[RunResult, TrainConfig], tmp_path: Path) -> None:
    run = fine_tune(base, tmp_path, "plain", "--quantization.experts", "none")
    assert {module.weight_rule for module in openk3.load(run).modules() if isinstance(module, Experts)} == {None}
    assert "quantization_config" not in (run / "config.json").read_text()


def test_gradients_reach_masters_as_if_nothing_had_been_rounded(base: tuple[RunResult, TrainConfig]) -> None:
    model = openk3.load(base[0].run)
    for module in model.modules():
        if isinstance(module, Experts):
            module.weight_rule, module.inputs = "even", "mxfp8"
    tokens = torch.arange(40)
    model.loss(tokens, Segments.of([40]), tokens).total.backward()
    experts = next(module for module in model.modules() if isinstance(module, Experts))
    assert experts.w13.grad is not None and bool(experts.w13.grad.isfinite().all()) and bool(experts.w13.grad.any())
    # The same network with the rounded values as its masters has the same gradient: rounding itself passes it on untouched.
    rounded = openk3.load(base[0].run)
    for module in rounded.modules():
        if isinstance(module, Experts):
            module.inputs = "mxfp8"
            for name in ("w13", "w2"):
                getattr(module, name).data = openk3.ops.mx.fake_quantize(getattr(module, name).data, "mxfp4")
    rounded.loss(tokens, Segments.of([40]), tokens).total.backward()
    other = next(module for module in rounded.modules() if isinstance(module, Experts))
    assert torch.equal(other.w13.grad, experts.w13.grad) and torch.equal(other.w2.grad, experts.w2.grad)


def test_a_run_with_rounding_goes_on_exactly(base: tuple[RunResult, TrainConfig], tmp_path: Path) -> None:
    whole = fine_tune(base, tmp_path, "whole")
    assert 'experts = "mxfp4"' in (whole / "config.toml").read_text()
    first = fine_tune(base, tmp_path, "first", "--checkpoint.every", "2")
    for later in (first / "checkpoints").glob("step-00000004"):
        later.rename(first / "checkpoints" / "gone")
    resume(first)
    assert fingerprint(first / "checkpoints" / "step-00000004") == fingerprint(whole / "checkpoints" / "step-00000004")


def test_training_goes_on_from_packed_experts(base: tuple[RunResult, TrainConfig], tmp_path: Path) -> None:
    convert(base[0].run, tmp_path / "packed", "mxfp4")
    config = dataclasses.replace(base[1], start_from=str(tmp_path / "packed"), model=TrainConfig().model)
    result = train(config, tmp_path / "on")
    assert not (tmp_path / "on" / "config.json").read_text().count("quantization_config")
    assert openk3.load(result.run).layers[1].mlp.experts.w13.dtype == torch.float32


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"latent_size": 16}, "the latent is 16, not a multiple"),
        ({"moe_intermediate_size": 16}, r"moe_intermediate_size\) is 16"),
        ({"num_experts": "none", "latent_size": "none", "latent_norm": False}, "no routed experts"),
    ],
)
def test_what_cannot_be_packed_is_refused_before_training(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    config = tiny(write_text(tmp_path / "text"), overrides={**WIDE, **changes}, experts="mxfp4")
    with pytest.raises(UserError, match=complaint):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_fine_tuning_needs(tmp_path: Path) -> None:
    source = chats(tmp_path / "chats.jsonl")
    for argv, complaint in (
        ([source, "--out", str(tmp_path / "r")], "--from"),
        ([source, "--from", str(tmp_path)], "--out"),
        ([source, "--from", str(tmp_path / "no"), "--out", str(tmp_path / "r"), "--steps", "1"], "does not exist"),
    ):
        with pytest.raises(UserError, match=complaint):
            sft(argv)
