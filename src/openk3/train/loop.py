"""The training loop, in one visible function, and the two ways into it: a new run, and one that goes on.

result = train(TrainConfig(...), "runs/first", on_event=print)
result = resume("runs/first", steps=2000)
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from openk3.errors import UserError
from openk3.model.routing_log import RoutingLog
from openk3.train import checkpointing, guards, memory, plot
from openk3.train.batches import Batch
from openk3.train.checkpointing import Checkpoint
from openk3.train.config import ScheduleSettings, TrainConfig
from openk3.train.evaluate import autocast, evaluate_part
from openk3.train.events import Balance, Begun, Notice, OnEvent, Saved, Step, ignore
from openk3.train.horizon import Horizon
from openk3.train.optimizer import clip_grad_norm
from openk3.train.prepare import Prepared, check_memory, prepare, reopen, resolve, resolve_compute
from openk3.train.run import Metrics, RunDirectory
from openk3.train.signals import StopRequest, stop_requests
from openk3.train.state import TrainingState

_PICTURE_SECONDS = 60.0
"""Between pictures of a run in progress: drawing one takes half a second."""


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    run: Path
    checkpoint: Path
    step: int
    tokens: int
    seconds: float
    loss: float | None
    """Of the last step, nats a token; None when there was none."""
    heldout: float | None
    """The last one measured."""
    finished: bool
    """False when it was asked to stop before its end."""
    signal: int | None = None
    """The signal that asked."""


class Diverged(UserError):
    """The loss or a gradient is not finite, or the loss leapt. The checkpoints are as they were."""


def train(config: TrainConfig, out: str | Path, on_event: OnEvent = ignore) -> RunResult:
    """Train in the new run directory `out`.

    Raises UserError for whatever is wrong with settings, texts, memory or the directory, before anything is trained; and `Diverged`.
    """
    if not config.data.paths:
        raise UserError("no text was named: give files or directories to train on")
    Horizon.of(config.schedule, 1)
    config, model, tokenizer = resolve(config)
    check_memory(config, model)
    with RunDirectory.create(out) as run:
        try:
            prepared = prepare(config, model, tokenizer, run, on_event)
        except BaseException:
            run.abandon()
            raise
        return _begin(prepared, run, None, on_event)


def resume(
    path: str | Path, on_event: OnEvent = ignore, *, steps: int | None = None, minutes: float | None = None, tokens: int | None = None
) -> RunResult:
    """Go on with the run at `path` from its newest checkpoint that is whole, or from the start when there is none yet.

    One of `steps`, `minutes` and `tokens` sets a new end of the whole run. Raises UserError as `train` does.
    """
    with RunDirectory.open(path) as run:
        config = run.settings()
        if steps is not None or minutes is not None or tokens is not None:
            config = dataclasses.replace(config, schedule=_new_end(config.schedule, steps, minutes, tokens))
        prepared = reopen(resolve_compute(config), run)
        checkpoint, complaints = checkpointing.newest_good(run.checkpoints)
        for complaint in complaints:
            on_event(Notice(f"{complaint}; it is set aside", warning=True))
        if checkpoint is None and complaints:
            raise UserError(f"no checkpoint of {run.path} is whole ({complaints[0]}); start anew, or put back a copy")
        checkpointing.set_aside(run.checkpoints, newer_than=-1 if checkpoint is None else checkpoint.step)
        on_event(Notice("no checkpoint yet: starting anew" if checkpoint is None else f"going on from step {checkpoint.step}"))
        Metrics.truncate(run.metrics, 0 if checkpoint is None else checkpoint.step)
        if config.schedule != run.settings().schedule:
            run.commit(config, prepared.model.to_json())
        return _begin(prepared, run, checkpoint, on_event)


def _begin(prepared: Prepared, run: RunDirectory, checkpoint: Checkpoint | None, on_event: OnEvent) -> RunResult:
    """Build the state, tell what is about to happen, and train unless the end was reached before."""
    config = prepared.config
    needed, room = check_memory(config, prepared.model)
    horizon = Horizon.of(config.schedule, config.data.tokens_per_batch * config.data.accumulation)
    with _threads(config.compute.threads or 1), contextlib.closing(Metrics(run.metrics)) as metrics:
        state = TrainingState.build(prepared, checkpoint)
        on_event(
            Begun(
                run=run.path,
                parameters=sum(parameter.numel() for parameter in state.model.parameters()),
                train_tokens=prepared.train.predictions,
                heldout_tokens=prepared.heldout.predictions if prepared.heldout is not None else 0,
                needed_bytes=needed,
                available_bytes=room,
                step=state.step,
                total_steps=horizon.steps,
                total_seconds=horizon.seconds,
            )
        )
        with stop_requests() as stop:
            return _loop(state, prepared, run, horizon, checkpoint, metrics, stop, on_event)


def _loop(
    state: TrainingState,
    prepared: Prepared,
    run: RunDirectory,
    horizon: Horizon,
    saved: Checkpoint | None,
    metrics: Metrics,
    stop: StopRequest,
    on_event: OnEvent,
) -> RunResult:
    """Steps until the end or a wish to stop; held-out loss, metrics and checkpoints on the way."""
    config = prepared.config
    began = time.monotonic() - state.seconds
    saved_at = drawn_at = time.monotonic()
    loss = heldout = None
    if saved is None and prepared.start is not None:
        # The weights it starts from may not be there any more when it is resumed.
        saved = _save(state, run, config.checkpoint.keep, on_event)
    while not horizon.reached(state.step, state.seconds) and not stop:
        step_began = time.monotonic()
        lr_scale = horizon.lr_scale(state.step, state.seconds)
        try:
            outcome = take_step(state, config, lr_scale)
        except TripError as trip:
            _append(metrics, {"step": state.step + 1, "stopped": str(trip)}, saved)
            _draw(run, on_event)
            raise Diverged(_explanation(trip, state, run, saved)) from None
        step_seconds = time.monotonic() - step_began
        state.step += 1
        state.tokens += outcome.tokens
        loss, measured = outcome.loss, None
        if state.step % config.evaluation.every == 0:
            measured = _heldout(state, prepared)
        state.seconds = time.monotonic() - began
        if measured is None and horizon.reached(state.step, state.seconds):
            measured = _heldout(state, prepared)
        heldout = heldout if measured is None else measured
        event = Step(
            step=state.step,
            share=horizon.share(state.step, state.seconds),
            loss=loss,
            heldout=measured,
            lr=config.optimizer.lr * lr_scale,
            grad_norm=outcome.grad_norm,
            tokens=state.tokens,
            tokens_per_second=outcome.tokens / max(step_seconds, 1e-9),
            balance=outcome.balance,
            seconds=state.seconds,
            eta=horizon.eta(state.step, state.seconds, state.seconds / state.step),
            memory=memory.resident(),
            epoch=state.batches.progress,
        )
        _append(metrics, _row(event), saved)
        on_event(event)
        if state.step % config.checkpoint.every == 0 or time.monotonic() - saved_at > config.checkpoint.minutes * 60:
            saved = _save(state, run, config.checkpoint.keep, on_event)
            saved_at = time.monotonic()
            if saved_at - drawn_at > _PICTURE_SECONDS:
                _draw(run, on_event)
                drawn_at = saved_at
    if saved is None or saved.step != state.step:
        saved = _save(state, run, config.checkpoint.keep, on_event)
    _draw(run, on_event)
    return RunResult(
        run=run.path,
        checkpoint=saved.path,
        step=state.step,
        tokens=state.tokens,
        seconds=state.seconds,
        loss=loss,
        heldout=heldout,
        finished=horizon.reached(state.step, state.seconds),
        signal=stop.signal,
    )


@dataclass(frozen=True)
class Outcome:
    """What a step came to."""

    loss: float
    grad_norm: float
    tokens: int
    balance: Balance | None


class TripError(Exception):
    """What is wrong with a step, found before it changed anything; `batches` are those that may be at fault."""

    def __init__(self, complaint: str, batches: list[Batch], place: str | None = None) -> None:
        super().__init__(complaint if place is None else f"{complaint}; {place}")
        self.batches = batches


def take_step(state: TrainingState, config: TrainConfig, lr_scale: float) -> Outcome:
    """One optimizer step. Raises TripError, with weights and optimizer untouched, when loss or gradient are not to be trusted."""
    model, device = state.model, state.model.device
    batches = [state.batches.next() for _ in range(config.data.accumulation)]
    # One mean over all tokens of the step: a mean of the micro-batches' means would weigh tokens unequally.
    tokens = sum(int((batch.targets >= 0).sum()) for batch in batches)
    nats = 0.0
    for batch in batches:
        inputs, routing = batch.tokens.to(device), RoutingLog(state.balancer.observe)
        try:
            with autocast(device, config.compute.precision):
                terms = model.loss(inputs, batch.segments, batch.targets.to(device), routing=routing, recompute=config.compute.recompute)
        except ValueError:
            # Routing refuses what is not finite. Anything else that is wrong is not for this handler.
            place = guards.locate(model, inputs, batch.segments)
            if place is None:
                raise
            raise TripError("the loss is nan", [batch], place) from None
        total = float(terms.total.detach())
        if not math.isfinite(total):
            raise TripError(f"the loss is {total}", [batch], guards.locate(model, inputs, batch.segments))
        (terms.total / tokens).backward()
        nats += total
    loss = nats / tokens
    norm = clip_grad_norm(state.optimizer.parameters, config.guard.clip)
    if not math.isfinite(norm):
        raise TripError(f"the norm of the gradient is {norm}", batches, guards.locate_gradient(model))
    complaint = state.guard.check(loss)
    if complaint is not None:
        raise TripError(complaint, batches)
    state.optimizer.step(lr_scale)
    state.optimizer.zero_grad()
    return Outcome(loss, norm, tokens, _balance(state))


def _explanation(trip: TripError, state: TrainingState, run: RunDirectory, saved: Checkpoint | None) -> str:
    first = trip.batches[0]
    documents = sorted({document for batch in trip.batches for document in batch.documents})
    named = ", ".join(map(str, documents[:5])) + (f" and {len(documents) - 5} more" if len(documents) > 5 else "")
    kept = f"the checkpoint of step {saved.step} is kept ({saved.path})" if saved is not None else "there was no checkpoint yet"
    return (
        f"stopped in step {state.step + 1}: {trip}; the batch: epoch {first.epoch}, token {first.positions[0]:,}, "
        f"documents {named} of {run.tokens}; {kept}; lower optimizer.lr in {run.config_file} and `openk3 resume {run.path}`"
    )


def _heldout(state: TrainingState, prepared: Prepared) -> float | None:
    if prepared.heldout is None:
        return None
    config = prepared.config
    return evaluate_part(
        state.model,
        prepared.heldout,
        tokens_per_batch=config.data.tokens_per_batch,
        sequence_length=config.data.sequence_length,
        max_tokens=config.evaluation.tokens,
        precision=config.compute.precision,
    ).loss


def _save(state: TrainingState, run: RunDirectory, keep: int, on_event: OnEvent) -> Checkpoint:
    if not guards.all_finite(state.model.parameters()):
        # The loss of the next step would say so, but by then these weights would pass for the last good ones.
        raise Diverged(f"stopped after step {state.step}: the update made a weight infinite or NaN; this state was not saved")
    began = time.monotonic()
    saved = state.save(run, keep)
    on_event(Saved(saved.path, saved.step, time.monotonic() - began))
    return saved


def _append(metrics: Metrics, row: dict[str, object], saved: Checkpoint | None) -> None:
    try:
        metrics.append(row)
    except OSError as error:
        kept = "there is no checkpoint yet" if saved is None else f"the checkpoint of step {saved.step} is whole"
        raise UserError(f"{metrics.path} cannot be written: {error.strerror}; {kept}; make room and resume") from None


def _draw(run: RunDirectory, on_event: OnEvent) -> None:
    try:
        plot.draw(run.metrics, run.plot)
    except OSError as error:
        on_event(Notice(f"{run.plot} cannot be written: {error.strerror or error}", warning=True))


def _row(event: Step) -> dict[str, object]:
    row: dict[str, object] = {
        field.name: getattr(event, field.name) for field in dataclasses.fields(event) if field.name not in ("share", "eta")
    }
    if event.balance is not None:
        row["balance"] = {
            "max_violation": event.balance.worst,
            "mean_violation": event.balance.mean,
            "utilisation": event.balance.used,
            "layers": event.balance.max_violation,
        }
    return row


def _new_end(schedule: ScheduleSettings, steps: int | None, minutes: float | None, tokens: int | None) -> ScheduleSettings:
    return dataclasses.replace(schedule, steps=steps, minutes=minutes, tokens=tokens)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _balance(state: TrainingState) -> Balance | None:
    """Let the router biases move, once a step, and read off how even the load was."""
    layers = state.balancer.update().layers
    if not layers:
        return None
    return Balance(
        max_violation={layer: one.max_violation for layer, one in layers.items()},
        utilisation={layer: one.utilisation for layer, one in layers.items()},
        load={layer: tuple(one.load.tolist()) for layer, one in layers.items()},
    )
