"""Where a run ends, how far along it is, and the learning rate there: counted in steps, or by the clock."""

from __future__ import annotations

from dataclasses import dataclass

from openk3.errors import UserError
from openk3.train.config import ScheduleSettings
from openk3.train.schedule import cosine_schedule

_TICKS = 1000
"""By the clock, a schedule counts milliseconds."""


@dataclass(frozen=True)
class Horizon:
    """Exactly one of `steps` and `seconds` is set."""

    steps: int | None
    seconds: float | None
    warmup: float
    final: float

    @staticmethod
    def of(schedule: ScheduleSettings, tokens_per_step: int) -> Horizon:
        """Raises UserError when the schedule has no end."""
        if schedule.minutes is not None:
            return Horizon(None, schedule.minutes * 60, schedule.warmup, schedule.final)
        if schedule.tokens is not None:
            return Horizon(-(-schedule.tokens // tokens_per_step), None, schedule.warmup, schedule.final)
        if schedule.steps is not None:
            return Horizon(schedule.steps, None, schedule.warmup, schedule.final)
        raise UserError(
            "how long to train is not said: give --steps, --minutes or --tokens (schedule.steps, .minutes or .tokens in a file)"
        )

    def share(self, step: int, seconds: float) -> float:
        """How much is done after `step` steps and `seconds` of training, 0 to 1."""
        done = step / self.steps if self.steps is not None else seconds / (self.seconds or 1.0)
        return min(1.0, done)

    def reached(self, step: int, seconds: float) -> bool:
        """Whether there is no further step."""
        return step >= self.steps if self.steps is not None else seconds >= (self.seconds or 0.0)

    def lr_scale(self, step: int, seconds: float) -> float:
        """The factor on the learning rate of the step after `step` steps and `seconds`."""
        if self.steps is not None:
            return cosine_schedule(step, self.steps, self.warmup, self.final)
        return cosine_schedule(int(seconds * _TICKS), max(1, int((self.seconds or 0.0) * _TICKS)), self.warmup, self.final)

    def eta(self, step: int, seconds: float, seconds_per_step: float) -> float:
        """Seconds to go, if each step takes `seconds_per_step`."""
        if self.steps is not None:
            return max(0, self.steps - step) * seconds_per_step
        return max(0.0, (self.seconds or 0.0) - seconds)
