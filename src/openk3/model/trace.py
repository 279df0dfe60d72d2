"""What one asks a forward pass to keep: the same pass that computes logits tells what went on inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

QUANTITIES = ("mixing", "decay", "write_strength", "routing")


@dataclass
class Trace:
    """Collects named quantities of one forward pass, detached.

    `wants` holds some of: `mixing` (AttnRes softmax over sources, `[T, S]`, keys `layer.3.attn`, `layer.3.mlp`, `output`),
    `decay` (KDA log decay `[T, H, K]`, keys `layer.3`), `write_strength` (KDA beta `[T, H]`), `routing` (expert ids `[T, k]`).
    `values[quantity][key]` then holds the tensors. Nothing is computed that was not asked for.
    """

    wants: frozenset[str] = frozenset()
    values: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @staticmethod
    def of(*wants: str) -> Trace:
        """A trace of the given quantities. Raises ValueError for an unknown one."""
        for name in wants:
            if name not in QUANTITIES:
                raise ValueError(f"a trace cannot keep {name!r}; it can keep {', '.join(QUANTITIES)}")
        return Trace(frozenset(wants))

    def note(self, quantity: str, key: str, make: Callable[[], Tensor]) -> None:
        """Keep `make()` under `quantity` and `key` if it is wanted."""
        if quantity in self.wants:
            self.values.setdefault(quantity, {})[key] = make().detach()
