"""What stops a run that goes wrong: a loss or gradient that is not finite, or a loss that leaps. Says where it began."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from openk3.model.decoder import Decoder
from openk3.ops.segments import Segments


class LossGuard:
    """Watches the loss of each step (nats a token).

    A loss trips it when it is not finite, or when it stands more than `leap` above the median of the last `window` losses; fewer than
    a fifth of `window` losses do not make a median.
    """

    def __init__(self, leap: float, window: int) -> None:
        self.leap = leap
        self.fewest = max(2, window // 5)
        self._recent: deque[float] = deque(maxlen=window)

    def check(self, loss: float) -> str | None:
        """Take in the loss of a step: what is wrong with it, or None. A loss that trips is not counted into the median."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if len(self._recent) >= self.fewest:
            median = statistics.median(self._recent)
            if loss > median + self.leap:
                return f"the loss leapt to {loss:.3f} from a median of {median:.3f} over the last {len(self._recent)} steps"
        self._recent.append(loss)
        return None

    def state_dict(self) -> list[float]:
        """The losses it remembers."""
        return list(self._recent)

    def load_state_dict(self, state: list[float]) -> None:
        """Go on from what `state_dict` gave."""
        self._recent.clear()
        self._recent.extend(state)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether every element is finite. The sum of squares of a tensor is finite only if its elements are, and is one pass."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


@torch.no_grad()
def locate(model: Decoder, tokens: Tensor, segments: Segments, gradients: bool) -> str:
    """Where the first value that is not finite is: in a weight, in the output of a layer for this batch, or in a gradient.

    `gradients` says whether the model holds those of the step at fault.
    """
    for name, parameter in model.named_parameters():
        if not all_finite([parameter]):
            return f"the weight {name} is not finite"
    layer = _first_layer(model, tokens, segments)
    if layer is not None:
        return layer
    if gradients:
        broken = [name for name, parameter in model.named_parameters() if parameter.grad is not None and not all_finite([parameter.grad])]
        if broken:
            # The backward pass walks from the loss down, so the deepest of them was reached first.
            return f"the first gradient that is not finite is that of {broken[-1]} ({len(broken)} of {_count(model)} parameters)"
    return "weights, layer outputs and gradients of this batch are finite"


def _first_layer(model: Decoder, tokens: Tensor, segments: Segments) -> str | None:
    output = model(tokens, segments, logits="last", hidden_states=True)
    for index, hidden_TD in enumerate(output.hidden_states or ()):
        if not all_finite([hidden_TD]):
            if index == 0:
                return "the embedding of this batch is not finite"
            kind = "MLA" if model.config.is_mla(index - 1) else "KDA"
            return f"the output of layer {index - 1} ({kind}) is the first that is not finite"
    return None


def _count(model: nn.Module) -> int:
    return sum(1 for _ in model.parameters())
