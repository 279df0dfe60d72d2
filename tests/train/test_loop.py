"""The loop: what a step computes, what a run writes, how it stops, and what it refuses before it begins."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import openk3
from openk3 import Segments, accounting
from openk3.errors import UserError
from openk3.train import loop, plot, prepare
from openk3.train.batches import Batch
from openk3.train.checkpointing import listed, newest_good
from openk3.train.config import TrainConfig
from openk3.train.events import Begun, Event, Notice, Saved, Step
from openk3.train.horizon import Horizon
from openk3.train.loop import Diverged, resume, take_step, train
from openk3.train.run import Metrics, RunDirectory
from openk3.train.state import TrainingState
from tests.train.runs import fingerprint, timeless, tiny, write_text


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than the runs."""
    monkeypatch.setattr(plot, "draw", lambda metrics, target: None)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def finished(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainConfig, list[Event]]:
    """A run of eight steps, its settings and its events. Tests must not change it."""
    events: list[Event] = []
    run, config = tmp_path_factory.mktemp("finished") / "run", tiny(text)
    result = train(config, run, on_event=events.append)
    assert result.finished and result.step == 8 and result.signal is None
    return run, config, events


def test_it_learns(text: Path, tmp_path: Path) -> None:
    result = train(tiny(text, steps=25, lr=0.02, every=1000), tmp_path / "run")
    rows = list(Metrics.read(tmp_path / "run" / "metrics.jsonl"))
    assert rows[0]["loss"] == pytest.approx(math.log(300), abs=0.5)
    assert result.heldout is not None and result.heldout < rows[0]["loss"] - 1.5


def test_what_a_run_leaves(finished: tuple[Path, TrainConfig, list[Event]]) -> None:
    run, config, events = finished
    assert {entry.name for entry in run.iterdir()} == {
        *("config.toml", "config.json", "tokenizer.json", "tokenizer_config.json", "tokens"),
        *("metrics.jsonl", "plot.png", "checkpoints", "openk3.lock"),
    }
    assert [checkpoint.step for checkpoint in listed(run / "checkpoints")] == [6, 8]
    assert (run / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert TrainConfig.from_toml(run / "config.toml") == config
    model = openk3.load(run)
    assert model.config == openk3.ModelConfig.from_json(run / "config.json")
    assert (model.config.vocab_size, model.config.bos_token_id, model.config.eos_token_id) == (300, 293, 294)
    steps = [event for event in events if isinstance(event, Step)]
    assert [event.step for event in steps] == list(range(1, 9))
    assert [event.step for event in steps if event.heldout is not None] == [4, 8]
    assert [event.step for event in events if isinstance(event, Saved)] == [3, 6, 8]
    assert steps[-1].share == 1.0 and steps[-1].eta == 0.0 and steps[0].share == 1 / 8
    begun = next(event for event in events if isinstance(event, Begun))
    assert begun.total_steps == 8 and begun.parameters == sum(p.numel() for p in model.parameters())
    assert any(isinstance(event, Notice) and "40 documents" in event.text for event in events)


def test_what_a_row_of_the_metrics_says(finished: tuple[Path, TrainConfig, list[Event]]) -> None:
    run, config, events = finished
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["tokens"] for row in rows] == [96 * step for step in range(1, 9)]
    horizon = Horizon.of(config.schedule, 96)
    assert [row["lr"] for row in rows] == [config.optimizer.lr * horizon.lr_scale(step, 0.0) for step in range(8)]
    assert set(rows[0]) == {
        *("step", "loss", "heldout", "lr", "grad_norm", "tokens", "tokens_per_second", "balance", "seconds", "memory", "epoch"),
    }
    assert rows[3]["heldout"] is not None and rows[2]["heldout"] is None
    assert set(rows[0]["balance"]) == {"max_violation", "mean_violation", "utilisation", "layers"}
    assert set(rows[0]["balance"]["layers"]) == {"1", "2"}
    assert all(row["grad_norm"] > 0 and row["tokens_per_second"] > 0 and row["memory"] > 2**20 for row in rows)
    for row, event in zip(rows, [event for event in events if isinstance(event, Step)], strict=True):
        assert row["loss"] == event.loss and row["balance"]["max_violation"] == event.balance.worst


def test_the_same_seed_gives_the_same_run(finished: tuple[Path, TrainConfig, list[Event]], tmp_path: Path) -> None:
    run, config, _ = finished
    train(config, tmp_path / "again")
    assert timeless(tmp_path / "again" / "metrics.jsonl") == timeless(run / "metrics.jsonl")
    assert fingerprint(listed(tmp_path / "again" / "checkpoints")[-1].path) == fingerprint(listed(run / "checkpoints")[-1].path)
    train(dataclasses.replace(config, seed=4), tmp_path / "other")
    assert timeless(tmp_path / "other" / "metrics.jsonl")[0]["loss"] != timeless(run / "metrics.jsonl")[0]["loss"]


def state_of(run: Path, **changes: Any) -> tuple[TrainingState, TrainConfig]:
    """The training state of `run`'s start, in this process."""
    with RunDirectory.open(run) as directory:
        prepared = prepare.reopen(directory.settings(), directory)
    config = dataclasses.replace(prepared.config, data=dataclasses.replace(prepared.config.data, **changes))
    return TrainingState.build(dataclasses.replace(prepared, config=config)), config


class Given:
    """Batches that were made by hand, in place of the stream."""

    def __init__(self, *batches: Batch) -> None:
        self.rest = list(batches)

    def next(self) -> Batch:
        return self.rest.pop(0)


def by_hand(tokens: torch.Tensor, lengths: list[int], ignored: slice = slice(0, 0)) -> Batch:
    targets = tokens.roll(-1).clone()
    targets[ignored] = -100
    return Batch(tokens, targets, Segments.of(lengths), tuple(Segments.of(lengths).starts), tuple(range(len(lengths))), 1, 0)


def gradients_of_a_step(run: Path, monkeypatch: pytest.MonkeyPatch, *batches: Batch) -> tuple[float, float, dict[str, torch.Tensor]]:
    state, config = state_of(run, accumulation=len(batches))
    state.batches = Given(*batches)  # type: ignore[assignment]
    seen: dict[str, torch.Tensor] = {}

    def keep(_: float) -> None:
        seen.update({name: p.grad.clone() for name, p in state.model.named_parameters() if p.grad is not None})

    monkeypatch.setattr(state.optimizer, "step", keep)
    outcome = take_step(state, config, 1.0)
    return outcome.loss, outcome.grad_norm, seen


def test_accumulated_gradients_are_those_of_one_batch(
    finished: tuple[Path, TrainConfig, list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 and 61 tokens with targets weigh 3 and 61 sixty-fourths, however they are divided into micro-batches."""
    tokens = torch.randint(0, 290, (70,), generator=torch.Generator().manual_seed(0))
    small, large = by_hand(tokens[:9], [9], slice(0, 6)), by_hand(tokens[9:], [30, 31])
    targets = torch.cat([small.targets, large.targets])
    whole = dataclasses.replace(by_hand(tokens, [9, 30, 31]), targets=targets)
    parts = gradients_of_a_step(finished[0], monkeypatch, small, large)
    one = gradients_of_a_step(finished[0], monkeypatch, whole)
    assert parts[0] == pytest.approx(one[0], rel=1e-6) and parts[1] == pytest.approx(one[1], rel=1e-5)
    assert parts[2].keys() == one[2].keys()
    for name, gradient in one[2].items():
        torch.testing.assert_close(parts[2][name], gradient, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("recompute", ["layer", "block"])
def test_recomputation_changes_no_number(
    finished: tuple[Path, TrainConfig, list[Event]], tmp_path: Path, text: Path, recompute: str
) -> None:
    """Equal metrics mean equal loads, too: a recomputed layer is not counted twice."""
    train(tiny(text, steps=2, recompute=recompute, accumulation=2), tmp_path / "less")
    train(tiny(text, steps=2, accumulation=2), tmp_path / "more")
    less, more = timeless(tmp_path / "less" / "metrics.jsonl"), timeless(tmp_path / "more" / "metrics.jsonl")
    assert [row["balance"] for row in less] == [row["balance"] for row in more]
    assert [row["loss"] for row in less] == pytest.approx([row["loss"] for row in more], rel=1e-5)


def test_one_step_clips_the_gradient(finished: tuple[Path, TrainConfig, list[Event]], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(0, 290, (40,), generator=torch.Generator().manual_seed(1))
    _, norm, gradients = gradients_of_a_step(finished[0], monkeypatch, by_hand(tokens, [40]))
    assert norm > 1.0
    assert math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values())) == pytest.approx(1.0, rel=1e-5)


def test_bf16_autocast_trains(text: Path, tmp_path: Path) -> None:
    config = tiny(text, steps=3, precision="bf16-autocast")
    result = train(config, tmp_path / "run")
    exact = train(tiny(text, steps=3), tmp_path / "exact")
    assert result.loss == pytest.approx(exact.loss, rel=0.02) and result.loss != exact.loss
    assert all(parameter.dtype == torch.float32 for parameter in openk3.load(tmp_path / "run").parameters())


def test_the_clock_can_end_a_run(text: Path, tmp_path: Path) -> None:
    result = train(tiny(text, steps=None, minutes=2 / 60), tmp_path / "run")
    assert result.finished and result.step > 1 and 2.0 <= result.seconds < 30.0
    rows = list(Metrics.read(tmp_path / "run" / "metrics.jsonl"))
    assert rows[-1]["heldout"] is not None and rows[-1]["lr"] < rows[len(rows) // 2]["lr"]


def test_tokens_can_end_a_run(text: Path, tmp_path: Path) -> None:
    assert train(tiny(text, steps=None, tokens=200), tmp_path / "run").step == 3


def test_without_held_out_text(text: Path, tmp_path: Path) -> None:
    result = train(tiny(text, steps=2, heldout=0.0), tmp_path / "run")
    assert result.heldout is None and result.finished


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop_it_saves_and_can_go_on(
    finished: tuple[Path, TrainConfig, list[Event]], tmp_path: Path, number: signal.Signals
) -> None:
    run, config, _ = finished

    def stop(event: Event) -> None:
        if isinstance(event, Step) and event.step == 5:
            signal.raise_signal(number)

    before = signal.getsignal(number)
    result = train(config, tmp_path / "run", on_event=stop)
    assert (result.finished, result.step, result.signal) == (False, 5, number)
    assert listed(tmp_path / "run" / "checkpoints")[-1].step == 5
    assert signal.getsignal(number) is before
    assert resume(tmp_path / "run").finished
    assert timeless(tmp_path / "run" / "metrics.jsonl") == timeless(run / "metrics.jsonl")
    assert fingerprint(tmp_path / "run" / "checkpoints" / "step-00000008") == fingerprint(run / "checkpoints" / "step-00000008")


def test_a_second_ctrl_c_stops_at_once(text: Path, tmp_path: Path) -> None:
    def impatient(event: Event) -> None:
        if isinstance(event, Step) and event.step == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tiny(text), tmp_path / "run", on_event=impatient)
    assert resume(tmp_path / "run").finished


def test_a_finished_run_says_so_and_can_be_made_longer(finished: tuple[Path, TrainConfig, list[Event]], text: Path, tmp_path: Path) -> None:
    train(tiny(text, steps=2), tmp_path / "run")
    result = resume(tmp_path / "run")
    assert result.finished and result.step == 2 and result.loss is None
    longer = resume(tmp_path / "run", steps=4)
    assert longer.finished and longer.step == 4
    assert TrainConfig.from_toml(tmp_path / "run" / "config.toml").schedule.steps == 4
    assert [row["step"] for row in Metrics.read(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_damaged_checkpoint_is_set_aside(finished: tuple[Path, TrainConfig, list[Event]], text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny(text), run)
    weights = run / "checkpoints" / "step-00000008" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    events: list[Event] = []
    assert resume(run, on_event=events.append).step == 8
    warnings = [event.text for event in events if isinstance(event, Notice) and event.warning]
    assert len(warnings) == 1 and "model.safetensors has" in warnings[0] and "it is set aside" in warnings[0]
    assert "going on from step 6" in [event.text for event in events if isinstance(event, Notice)]
    assert (run / "checkpoints" / "damaged-step-00000008").is_dir()
    assert fingerprint(run / "checkpoints" / "step-00000008") == fingerprint(finished[0] / "checkpoints" / "step-00000008")
    assert timeless(run / "metrics.jsonl") == timeless(finished[0] / "metrics.jsonl")


def test_no_whole_checkpoint_is_an_error_that_loses_nothing(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(tiny(text, steps=1), run)
    (run / "checkpoints" / "step-00000001" / "training.pt").unlink()
    metrics = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"no checkpoint of .*run is whole \(.*step-00000001: training.pt is missing\)"):
        resume(run)
    assert (run / "metrics.jsonl").read_bytes() == metrics and (run / "checkpoints" / "step-00000001").is_dir()


@pytest.mark.parametrize("harm", ["nan", "overflow", "leap"])
def test_a_loss_that_breaks_stops_the_run_and_says_where(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    original = loop.take_step

    @torch.no_grad()
    def poison(state: TrainingState) -> None:
        if harm == "nan":
            state.model.layers[1].attn.o_proj.weight[3, 4] = math.nan
        elif harm == "overflow":
            state.model.layers[2].mlp.latent_up.weight.fill_(3e38)
        else:
            state.model.head.weight.normal_(0.0, 10.0, generator=torch.Generator().manual_seed(0))

    def poisoned(state: TrainingState, config: TrainConfig, lr_scale: float) -> Any:
        if state.step == 4:
            poison(state)
        return original(state, config, lr_scale)

    monkeypatch.setattr(loop, "take_step", poisoned)
    with pytest.raises(Diverged) as stopped:
        train(tiny(text, steps=6, window=10), tmp_path / "run")
    message = str(stopped.value)
    assert message.startswith("stopped in step 5: the loss ") and "\n" not in message
    said = {
        "nan": "the loss is nan; the weight layers.1.attn.o_proj.weight is not finite; the batch",
        "overflow": "; the output of layer 2 (KDA) is the first that is not finite; the batch",
        "leap": "over the last 4 steps; the batch",
    }
    assert said[harm] in message
    assert "the batch: epoch " in message and ", token " in message and "documents " in message
    assert "the checkpoint of step 3 is kept" in message and "openk3 resume" in message
    good, complaints = newest_good(tmp_path / "run" / "checkpoints")
    assert good is not None and good.step == 3 and not complaints
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 5 and last["stopped"] in message
    monkeypatch.setattr(loop, "take_step", original)
    assert resume(tmp_path / "run").finished


def test_a_broken_gradient_stops_the_run(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = loop.clip_grad_norm
    calls = 0

    def broken(parameters: Any, bound: float) -> float:
        nonlocal calls
        calls += 1
        parameters = list(parameters)
        if calls == 3:
            parameters[0].grad[:] = math.inf
        return original(parameters, bound)

    monkeypatch.setattr(loop, "clip_grad_norm", broken)
    with pytest.raises(
        Diverged, match=r"stopped in step 3: the norm of the gradient is inf; the first gradient that is not finite is that of"
    ):
        train(tiny(text), tmp_path / "run")


def test_an_update_that_breaks_the_weights_is_not_saved(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = loop.take_step

    def breaking(state: TrainingState, config: TrainConfig, lr_scale: float) -> Any:
        outcome = original(state, config, lr_scale)
        if state.step == 5:
            with torch.no_grad():
                state.model.head.weight[0, 0] = math.inf
        return outcome

    monkeypatch.setattr(loop, "take_step", breaking)
    with pytest.raises(Diverged, match="after step 6: the update made a weight infinite or NaN"):
        train(tiny(text), tmp_path / "run")
    assert [checkpoint.step for checkpoint in listed(tmp_path / "run" / "checkpoints")] == [3]


def test_a_disk_that_fills_up_while_the_metrics_are_written(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Metrics.append

    def full(self: Metrics, row: dict[str, Any]) -> None:
        if row["step"] == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(self, row)

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "append", full)
        with pytest.raises(UserError, match=r"metrics.jsonl cannot be written: No space left on device; the checkpoint of step 3 is whole"):
            train(tiny(text), tmp_path / "run")
    assert resume(tmp_path / "run").finished


def test_what_cannot_fit_is_refused_before_anything_is_written(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Activations must outweigh what the optimizer needs for its work.
    config = tiny(text, tokens_per_batch=20000)
    monkeypatch.setattr("openk3.train.memory.available", lambda: 2**20)
    with pytest.raises(UserError, match=r"this needs .* of memory \(.*weights .*\), but 1.0 MiB are available: .*take a smaller model"):
        train(config, tmp_path / "run")
    # Room for the weights and all that, and for the activations of a few tokens.
    _, model, _ = prepare.resolve(config)
    needed = accounting.training_bytes(model, tokens=6000, sequence_length=40, recompute="block")
    monkeypatch.setattr("openk3.train.memory.available", lambda: sum(needed.values()))
    with pytest.raises(UserError, match=r"with --compute.recompute block --data.tokens-per-batch 5000 it takes"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"this needs .* TiB of memory \(.*weights .*, but .* are available: no batch is small enough"):
        train(dataclasses.replace(tiny(text), model=dataclasses.replace(tiny(text).model, name="k3", overrides={})), tmp_path / "run")
    assert not (tmp_path / "run").exists()
