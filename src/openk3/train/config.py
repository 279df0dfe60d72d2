"""Everything that decides a training run: a strict tree of dataclasses ← a TOML file ← the command line.

    [model]
    name = "nano"

    [data]
    paths = ["books/"]
    tokens_per_batch = 4096

    [schedule]
    steps = 2000

The resolved tree is written into the run directory as `config.toml` and read back equal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from openk3.config import ModelConfig, resolve
from openk3.errors import UserError
from openk3.train import toml_tree
from openk3.train.optimizer_settings import OptimizerConfig

DEFAULT_MODEL = "nano"
NONE = "none"
"""TOML has no null; as the value of an override this word stands for it."""


def _flag(name: str) -> Any:
    """A flag without its section's name: `--steps` for `schedule.steps`."""
    return tyro.conf.arg(name=name, prefix_name=False)


def _at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and not (math.isfinite(value) and value >= least):
        raise UserError(f"{name} is {value}: it must be {least} or more")


def _above(name: str, value: float | None, bound: float = 0) -> None:
    if value is not None and not (math.isfinite(value) and value > bound):
        raise UserError(f"{name} is {value}: it must be above {bound}")


def _share(name: str, value: float, *, below: bool = True) -> None:
    if not (0 <= value < 1 or (value == 1 and not below)):
        raise UserError(f"{name} is {value}: it must be from 0 {'to below' if below else 'to'} 1")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """What is trained."""

    name: Annotated[str | None, _flag("model")] = None
    """A named config (debug13, nano, mini, mid, …), or the path of a config.json; None is nano, or the model of --from."""
    overrides: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    """Fields of ModelConfig that differ from it, by name; "none" is null. On the command line: --set."""

    def build(self) -> ModelConfig:
        """The model's config, before the tokenizer has had its say. Raises UserError naming what is wrong."""
        changes = {key: None if value == NONE else value for key, value in self.overrides.items()}
        return resolve(self.name or DEFAULT_MODEL).replace(**changes)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """What it is trained on."""

    paths: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    """Text files and directories, or files of conversations. On the command line: the positional arguments."""
    kind: Annotated[Literal["text", "conversations"], tyro.conf.Suppress] = "text"
    """What the paths hold: text (`openk3 train`) or conversations (`openk3 sft`)."""
    heldout: float = 0.02
    """Share of the documents that is kept aside to measure held-out loss on."""
    tokenizer: str | None = None
    """A tokenizer.json, or a directory that holds one; None trains one on the texts."""
    vocab_size: int | None = None
    """Size of the tokenizer that is trained; None takes the model's vocabulary."""
    tokens_per_batch: int = 4096
    """Tokens of one micro-batch: one forward and backward pass."""
    sequence_length: int = 512
    """Longer documents are cut into pieces of so many tokens."""
    accumulation: int = 1
    """Micro-batches that make up one optimizer step."""

    def __post_init__(self) -> None:
        _share("data.heldout", self.heldout)
        _at_least("data.vocab_size", self.vocab_size, 1)
        _at_least("data.tokens_per_batch", self.tokens_per_batch, 1)
        _at_least("data.sequence_length", self.sequence_length, 1)
        _at_least("data.accumulation", self.accumulation, 1)
        if self.tokenizer is not None and self.vocab_size is not None:
            raise UserError("data.tokenizer and data.vocab_size are both given: a tokenizer that is there has its size already")
        if self.sequence_length > self.tokens_per_batch:
            raise UserError(
                f"data.sequence_length is {self.sequence_length}, more than the {self.tokens_per_batch} tokens of a batch "
                "(data.tokens_per_batch)"
            )


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """How long, and the learning rate over that time: a cosine after a short warm-up. Give one of steps, minutes and tokens."""

    steps: Annotated[int | None, _flag("steps")] = None
    """Optimizer steps in all."""
    minutes: Annotated[float | None, _flag("minutes")] = None
    """Wall-clock minutes of training in all; the learning rate follows the clock."""
    tokens: Annotated[int | None, _flag("tokens")] = None
    """Training tokens in all."""
    warmup: float = 0.01
    """Share of the run in which the learning rate rises."""
    final: float = 0.1
    """The learning rate at the end, as a share of the highest."""

    def __post_init__(self) -> None:
        _at_least("schedule.steps", self.steps, 1)
        _above("schedule.minutes", self.minutes)
        _at_least("schedule.tokens", self.tokens, 1)
        _share("schedule.warmup", self.warmup)
        _share("schedule.final", self.final, below=False)
        given = [name for name in ("steps", "minutes", "tokens") if getattr(self, name) is not None]
        if len(given) > 1:
            raise UserError(f"schedule.{given[0]} and schedule.{given[1]} are both given: a run has one end, give one of them")


@dataclass(frozen=True, kw_only=True)
class ComputeSettings:
    """Where and in which precision it is computed."""

    device: str = "auto"
    """cpu, cuda, or auto: a GPU when there is one."""
    precision: Literal["auto", "fp32", "bf16-autocast"] = "auto"
    """auto is bf16-autocast where the hardware multiplies bf16 (a GPU, AMX, AVX-512-BF16), else fp32. Weights are fp32 in all."""
    recompute: Literal["none", "layer", "block"] = "none"
    """Keep fewer activations and compute them again in the backward pass: less memory, about a third more time."""
    threads: int | None = None
    """CPU threads; None takes the CPUs this process may use. Results are bit-equal only at equal threads."""

    def __post_init__(self) -> None:
        _at_least("compute.threads", self.threads, 1)
        if self.device not in ("auto", "cpu") and self.device.partition(":")[0] != "cuda":
            raise UserError(f"compute.device is {self.device!r}: it must be auto, cpu or cuda")


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When the run is saved."""

    every: int = 500
    """Steps between checkpoints."""
    minutes: float = 10.0
    """A checkpoint is also written when the last one is so old."""
    keep: int = 2
    """The newest so many are kept."""

    def __post_init__(self) -> None:
        _at_least("checkpoint.every", self.every, 1)
        _above("checkpoint.minutes", self.minutes)
        _at_least("checkpoint.keep", self.keep, 1)


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """When held-out loss is measured."""

    every: int = 50
    """Steps between measurements."""
    tokens: int = 16384
    """Held-out tokens that are measured, always the same ones."""

    def __post_init__(self) -> None:
        _at_least("evaluation.every", self.every, 1)
        _at_least("evaluation.tokens", self.tokens, 1)


@dataclass(frozen=True, kw_only=True)
class GuardSettings:
    """When a run that goes wrong is stopped."""

    leap: float = 3.0
    """Stop when the loss (nats a token) is so far above the median of the last `window` steps. NaN and infinity always stop it."""
    window: int = 50
    """Steps that the median is taken over; fewer than a fifth of it never stop a run."""

    clip: float = 1.0
    """Gradients are scaled down to this joint 2-norm."""

    def __post_init__(self) -> None:
        _above("guard.leap", self.leap)
        _above("guard.clip", self.clip)
        _at_least("guard.window", self.window, 5)


@dataclass(frozen=True, kw_only=True)
class BalancingSettings:
    """How the load of the experts is kept even."""

    rule: Literal["quantile", "sign", "none"] = "quantile"
    """quantile sets each selection bias from the step's own margins (K3); sign moves it up or down; none leaves it."""
    bins: int = 1000
    """Of the quantile rule's histograms."""
    ema: float | None = None
    """Share of the past in a running mean of the quantiles; None takes each step's own."""
    sign_step: float = 1e-3
    """How far the sign rule moves a bias in a step."""

    def __post_init__(self) -> None:
        _at_least("balancing.bins", self.bins, 1)
        _share("balancing.ema", self.ema or 0.0)
        _above("balancing.sign_step", self.sign_step)


@dataclass(frozen=True, kw_only=True)
class QuantizationSettings:
    """Quantization-aware training of the routed experts: the forward pass sees them as they will be served."""

    experts: Literal["none", "mxfp4"] = "none"
    """mxfp4: the forward pass rounds their weights; the masters stay in fp32."""
    activations: Literal["mxfp8", "none"] = "mxfp8"
    """With mxfp4: the format in which they read their inputs, in training and wherever the result is served."""
    scale_rule: Literal["even", "floor", "ceil"] = "even"
    """Which power of two a block of 32 weights gets: even (as compressed-tensors writes), floor (OCP), ceil (nothing saturates)."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """All settings of a run."""

    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    balancing: BalancingSettings = field(default_factory=BalancingSettings)
    compute: ComputeSettings = field(default_factory=ComputeSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    guard: GuardSettings = field(default_factory=GuardSettings)
    quantization: QuantizationSettings = field(default_factory=QuantizationSettings)
    seed: int = 0
    """Of the starting weights and of the order of the data: the same seed gives the same run."""
    start_from: Annotated[str | None, _flag("from")] = None
    """Start from the weights and the tokenizer of this checkpoint or run instead of from scratch."""

    def __post_init__(self) -> None:
        if self.start_from is not None and (self.model.name is not None or self.model.overrides):
            raise UserError(
                f"the model comes from {self.start_from} (--from): leave out its name and its fields (model.name, model.overrides)"
            )
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed}: it must be from 0 to below 2**63")

    @staticmethod
    def from_toml(path: str | Path) -> TrainConfig:
        """The settings in the TOML file `path`; what it leaves out keeps its default. Raises UserError naming the file and the key."""
        return toml_tree.build(TrainConfig, toml_tree.read_file(path), str(path))

    def to_toml(self) -> str:
        """TOML text that `from_toml` reads back equal."""
        return toml_tree.dump(self)


def with_overrides(config: TrainConfig, assignments: Mapping[str, Any]) -> TrainConfig:
    """`config` with some of the model's fields set, by name."""
    model = dataclasses.replace(config.model, overrides={**config.model.overrides, **assignments})
    return dataclasses.replace(config, model=model)
