"""What tests share: where the oracles lie, and how far two tensors are apart."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

ORACLES = Path(__file__).parent / "oracles"


@cache
def oracle_tensors(name: str) -> dict[str, Tensor]:
    """The tensors of `tests/oracles/NAME.safetensors`."""
    return load_file(ORACLES / f"{name}.safetensors")


@cache
def oracle_json(name: str) -> dict[str, Any]:
    """The content of `tests/oracles/NAME.json`."""
    return json.loads((ORACLES / f"{name}.json").read_text())


def worst(actual: Tensor, expected: Tensor) -> float:
    """The largest absolute difference; fails on a shape that differs."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} against {tuple(expected.shape)}"
    if not actual.numel():
        return 0.0
    return float((actual.double() - expected.double()).abs().max())


def relative(actual: Tensor, expected: Tensor) -> float:
    """The largest absolute difference over the root mean square of what is expected."""
    scale = float(expected.double().square().mean().sqrt()) if expected.numel() else 1.0
    return worst(actual, expected) / max(scale, 1e-30)
