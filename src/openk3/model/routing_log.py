"""Which experts a forward pass chose: recorded once, replayed whenever the same pass runs again."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from openk3.ops.routing import Selection


class RoutingLog:
    """The expert ids of each MoE layer in one forward pass over one batch.

    A layer that the log does not hold routes freely, is recorded, and is shown to `observe(layer, selection)` once. A layer that it holds
    is replayed: the same ids, weights from the current scores. So activation recompute picks the same experts and counts no token
    twice, and two implementations can be compared under equal routing.
    """

    def __init__(self, observe: Callable[[int, Selection], None] | None = None, *, ids: dict[int, Tensor] | None = None) -> None:
        self.ids: dict[int, Tensor] = {} if ids is None else dict(ids)
        self._observe = observe

    def replay(self, layer: int) -> Tensor | None:
        """The ids `[T, k]` that layer `layer` must use, or None when it is free."""
        return self.ids.get(layer)

    def record(self, layer: int, selection: Selection) -> None:
        """Keep a free layer's choice and show it to the observer."""
        self.ids[layer] = selection.ids
        if self._observe is not None:
            self._observe(layer, selection)
