"""Where arithmetic must be at least fp32 whatever the model's dtype (rule 7 of the house)."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype in which statistics and sums over `tensors` are taken: float64 if any is float64, otherwise float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def exact(x: Tensor) -> torch.autocast:
    """A context in which matrix products run in the dtype of their operands even where the caller autocasts to a narrower one."""
    return torch.autocast(x.device.type, enabled=False)
