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
    """Whether every element of every tensor is finite."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors)


@torch.no_grad()
def locate(model: Decoder, tokens: Tensor, segments: Segments) -> str | None:
    """Where the first value that is not finite is: in a weight, or in the output of a layer for this batch. None: nowhere."""
    for name, parameter in model.named_parameters():
        if not all_finite([parameter]):
            return f"the weight {name} is not finite"
    reached: list[int] = []
    broken: list[int] = []

    def watch(module: nn.Module, inputs: object, residual: tuple[Tensor, list[Tensor]]) -> None:
        reached.append(len(reached))
        if not all_finite([residual[0]]):
            broken.append(reached[-1])

    handles = [layer.register_forward_hook(watch) for layer in model.layers]
    try:
        hidden = model(tokens, segments, logits="last").hidden
    except ValueError as error:
        # Routing refuses scores that are not finite, so the layer that it belongs to gives no output.
        return _said_of(model, broken[0]) if broken else f"in layer {len(reached)}, {error}"
    finally:
        for handle in handles:
            handle.remove()
    if broken:
        return _said_of(model, broken[0])
    return None if all_finite([hidden]) else "what the head reads is the first that is not finite"


def locate_gradient(model: nn.Module) -> str | None:
    """Which parameter's gradient is the first that is not finite, in the order of the backward pass. None: all are finite."""
    broken = [name for name, parameter in model.named_parameters() if parameter.grad is not None and not all_finite([parameter.grad])]
    if not broken:
        return None
    # The backward pass walks from the loss down, so the deepest of them was reached first.
    total = sum(1 for _ in model.parameters())
    return f"the first gradient that is not finite is that of {broken[-1]} ({len(broken)} of {total} parameters)"


def _said_of(model: Decoder, layer: int) -> str:
    return f"the output of layer {layer} ({'MLA' if model.config.is_mla(layer) else 'KDA'}) is the first that is not finite"
