"""Parameters that stay in fp32 whatever the model's dtype (rule 7 of the house: structural, not a cast that a later `.to` undoes)."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor, nn


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """At least fp32: float64 for float64, float32 for everything narrower."""
    return torch.promote_types(dtype, torch.float32)


def narrowed(x: Tensor) -> Tensor:
    """`x` in the dtype that autocast gives to products, where it is on; `x` itself elsewhere. For ops that autocast does not know."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x


class IslandModule(nn.Module):
    """A module some of whose own parameters or buffers, `islands`, never become narrower than fp32.

    `.to(bfloat16)`, `.half()` and a bfloat16 default dtype leave them as they are, bit for bit; `.double()` widens them.
    """

    islands: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept = {name: (tensor.data, tensor.grad) for name in self.islands if (tensor := getattr(self, name, None)) is not None}
        super()._apply(fn, recurse)
        for name, (data, grad) in kept.items():
            tensor = getattr(self, name)
            if tensor.dtype != accumulation_dtype(tensor.dtype):
                tensor.data = data.to(device=tensor.device)
                tensor.grad = None if grad is None else grad.to(device=tensor.device)
        return self


def island(*shape: int, device: torch.device | None = None) -> nn.Parameter:
    """An uninitialised parameter in at least fp32."""
    return nn.Parameter(torch.empty(*shape, device=device, dtype=accumulation_dtype(torch.get_default_dtype())))


class Projection(nn.Linear):
    """`y = x Wᵀ` without a bias, `weight [out, in]`. Left uninitialised: `model.init` fills the whole model at once."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__(width_in, width_out, bias=False)

    def reset_parameters(self) -> None:
        """Nothing: see `model.init`."""
