"""What a training run tells while it goes on: to the display, to the demo, to whoever passes `on_event`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Notice:
    """Something a person should know, in one line."""

    text: str
    warning: bool = False


@dataclass(frozen=True)
class Begun:
    """Preparations are over."""

    run: Path
    parameters: int
    train_tokens: int
    """Tokens to be predicted in one pass over the training part."""
    heldout_tokens: int
    needed_bytes: int
    """Estimate of the memory that training takes."""
    available_bytes: int
    step: int
    """Steps that are done already: more than 0 when a run is resumed."""
    total_steps: int | None
    """None when the clock ends the run."""
    total_seconds: float | None


@dataclass(frozen=True)
class Balance:
    """How evenly the experts were loaded in a step; by MoE layer."""

    max_violation: dict[int, float] = field(default_factory=dict)
    """The busiest expert's tokens over the mean, less 1."""
    utilisation: dict[int, float] = field(default_factory=dict)
    """Share of the experts that got any token."""

    load: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Tokens of each expert."""

    @property
    def mean(self) -> float:
        """The mean violation over the layers."""
        return sum(self.max_violation.values()) / max(1, len(self.max_violation))

    @property
    def worst(self) -> float:
        """The greatest violation of any layer."""
        return max(self.max_violation.values(), default=0.0)

    @property
    def used(self) -> float:
        """Mean utilisation over the layers."""
        return sum(self.utilisation.values()) / max(1, len(self.utilisation))


@dataclass(frozen=True)
class Step:
    """One optimizer step."""

    step: int
    """Steps done, this one included."""
    share: float
    """How much of the run is done, 0 to 1."""
    loss: float
    """Nats a token, of this step's batch before the update."""
    heldout: float | None
    """Nats a held-out token, when it was measured after this step."""
    lr: float
    grad_norm: float
    """Joint 2-norm before clipping."""
    tokens: int
    """Trained on so far."""
    tokens_per_second: float
    """Of this step, without measuring held-out loss and saving."""
    balance: Balance | None
    """None where no layer has experts."""
    seconds: float
    """Wall-clock time of the run so far, without its preparation."""
    eta: float
    """Seconds to go, guessed."""
    memory: int
    """Bytes that the process holds."""
    epoch: float
    """Passes over the training part so far."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written."""

    path: Path
    step: int
    seconds: float


Event = Notice | Begun | Step | Saved
OnEvent = Callable[[Event], None]


def ignore(_: Event) -> None:
    """For whoever does not listen."""
