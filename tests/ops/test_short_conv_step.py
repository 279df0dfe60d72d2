"""The short convolution's decode step against the plain statement, and against one call over the whole sequence."""

from __future__ import annotations

import pytest
import torch

from openk3.ops.segments import Segments
from openk3.ops.short_conv import short_conv, short_conv_reference
from tests.support import worst


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_step_equals_reference(dtype: torch.dtype, bound: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, tail = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 12), (5, 12, 3)))
    weight = torch.randn(12, 1, 4, generator=generator, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    segments = Segments.of([1] * 5)
    y, new_tail = short_conv(x, weight, segments, tail)
    expected_y, expected_tail = short_conv_reference(x, weight, segments, tail)
    assert y.dtype == dtype and worst(y, expected_y) < bound
    assert torch.equal(new_tail, expected_tail)


def test_steps_add_up_to_one_call() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 9, 6, generator=generator, dtype=torch.float64)
    weight = torch.randn(6, 1, 4, generator=generator, dtype=torch.float64)
    whole, whole_tail = short_conv(x.flatten(0, 1), weight, Segments.of([9, 9]))
    tail = torch.zeros(2, 6, 3, dtype=torch.float64)
    steps = []
    for t in range(9):
        y, tail = short_conv(x[:, t].contiguous(), weight, Segments.of([1, 1]), tail)
        steps.append(y)
    assert worst(torch.stack(steps, 1).flatten(0, 1), whole) < 1e-13
    assert torch.equal(tail, whole_tail)
