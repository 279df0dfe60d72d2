"""How the learning rate moves over a run: a pure function of the step, so that resuming needs no state.

K3 used a cosine with 1 % linear warm-up down to a minimum (Kimi K3 report §3.2); the minimum itself is not public.
"""

from __future__ import annotations

import math


def cosine_schedule(step: int, total: int, warmup_fraction: float = 0.01, min_ratio: float = 0.1) -> float:
    """The factor on the peak learning rate for update number `step` (from 0) of `total`.

    Rises linearly to 1 over ⌈warmup_fraction · total⌉ steps, none of which is 0; then falls along half a cosine towards `min_ratio`,
    which it has from step `total` on. With `min_ratio` 1 it stays constant after the warm-up. Raises ValueError for arguments out of range.
    """
    if step < 0 or total < 1:
        raise ValueError(f"step {step} of {total}: a schedule counts steps from 0 and has at least one")
    if not 0.0 <= warmup_fraction < 1.0:
        raise ValueError(f"warmup_fraction is in [0, 1), not {warmup_fraction}")
    if not 0.0 <= min_ratio <= 1.0:
        raise ValueError(f"min_ratio is in [0, 1], not {min_ratio}")
    # Rounded first: 0.07 · 100 is a hair above 7 in floating point.
    warmup = math.ceil(round(warmup_fraction * total, 9))
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress))
