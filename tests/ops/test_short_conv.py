"""The short convolution: values, gradients, and what a sequence carries from call to call."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.ops import backend
from openk3.ops import short_conv as module
from openk3.ops.segments import Segments
from openk3.ops.short_conv import short_conv, short_conv_reference
from tests.ops.compare import normal, saved_bytes
from tests.support import oracle_tensors, worst

FORMS = ("reference", "torch")


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


@pytest.mark.parametrize("form", FORMS)
def test_oracle(form: str) -> None:
    stored = oracle_tensors("ops")
    x, weight, state = (stored[f"conv.{name}"].double() for name in ("x", "weight", "state_in"))
    segments = Segments.of([x.shape[1]] * x.shape[0])
    with backend.use(form):
        for tail, suffix in ((state[:, :, 1:], "state"), (None, "nostate")):
            y, new_tail = short_conv(x.flatten(0, 1), weight, segments, tail)
            assert worst(y, stored[f"conv.y_{suffix}_f64"].flatten(0, 1)) <= 1e-9
            wanted = stored["conv.state_out_f64" if suffix == "state" else "conv.state_nostate_f64"]
            assert worst(new_tail, wanted[:, :, 1:]) <= 1e-9
            narrow, _ = short_conv(x.flatten(0, 1).float(), weight.float(), segments, None if tail is None else tail.float())
            assert worst(narrow, y) <= 2e-6


@pytest.mark.parametrize("form", [short_conv, short_conv_reference])
def test_by_hand(form) -> None:
    # Two sequences, W = 3; the newest tap is the last.
    x = torch.tensor([[1.0], [2.0], [10.0]], dtype=torch.float64)
    weight = torch.tensor([[[100.0, 10.0, 1.0]]], dtype=torch.float64)
    tail = torch.tensor([[[0.5, 0.25]], [[3.0, 4.0]]], dtype=torch.float64)
    y, new_tail = form(x, weight / 100, Segments.of([2, 1]), tail)
    assert y.flatten().tolist() == pytest.approx([silu(0.5 + 0.025 + 0.01), silu(0.25 + 0.1 + 0.02), silu(3 + 0.4 + 0.1)])
    assert new_tail.flatten().tolist() == [1.0, 2.0, 4.0, 10.0]


def both(lengths: list[int], taps: int, with_tail: bool, channels: int = 3, seed: int = 0) -> None:
    segments = Segments.of(lengths)
    inputs = [normal(segments.total, channels, seed=seed), normal(channels, 1, taps, seed=seed + 1)]
    if with_tail:
        inputs.append(normal(segments.count, channels, taps - 1, seed=seed + 2))
    dy, dtail = normal(segments.total, channels, seed=seed + 3), normal(segments.count, channels, taps - 1, seed=seed + 4)
    found = []
    for form in (short_conv, short_conv_reference):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = form(leaves[0], leaves[1], segments, leaves[2] if with_tail else None)
        grads = torch.autograd.grad((out[0] * dy).sum() + (out[1] * dtail).sum(), leaves, allow_unused=True)
        found.append([t.detach() for t in out] + [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)])
    for actual, wanted in zip(*found, strict=True):
        assert worst(actual, wanted) <= 1e-11


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), max_size=8), taps=st.integers(1, 5), with_tail=st.booleans())
def test_any_ragged_batch(lengths: list[int], taps: int, with_tail: bool) -> None:
    both(lengths, taps, with_tail, seed=sum(lengths))


@pytest.mark.parametrize("with_tail", [True, False])
@pytest.mark.parametrize("channels", [1, 2])
def test_blocks_join_without_a_seam(channels: int, with_tail: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 1)
    monkeypatch.setattr(module, "_NARROWEST", channels)
    for lengths in ([20], [1, 2, 3, 0, 4, 5, 1, 9], [1, 1, 1]):
        both(lengths, 4, with_tail)


@pytest.mark.parametrize("piece", [1, 2, 3])
def test_a_carried_tail_has_its_gradient(piece: int) -> None:
    x, weight, tail = normal(12, 5, seed=1), normal(5, 1, 4, seed=2), normal(1, 5, 3, seed=3)
    dy, dtail = normal(12, 5, seed=4), normal(1, 5, 3, seed=5)

    def run(size: int) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, weight, tail)]
        outputs, carried = [], leaves[2]
        for start in range(0, 12, size):
            y, carried = short_conv(leaves[0][start : start + size], leaves[1], Segments.of([size]), carried)
            outputs.append(y)
        return [torch.cat(outputs).detach(), carried.detach(), *torch.autograd.grad((torch.cat(outputs), carried), leaves, (dy, dtail))]

    for actual, wanted in zip(run(piece), run(12), strict=True):
        assert worst(actual, wanted) <= 1e-12


def test_causal_and_separate_to_the_last_bit() -> None:
    segments = Segments.of([9, 0, 1, 12])
    x, weight = normal(22, 4, seed=1).float(), normal(4, 1, 4, seed=2).float()
    y, _ = short_conv(x, weight, segments)
    for at in range(22):
        other = x.clone()
        other[at] = float("nan")
        changed = short_conv(other, weight, segments)[0]
        start = max(s for s, length in zip(segments.starts, segments.lengths, strict=True) if length and s <= at)
        end = start + segments.lengths[int(segments.ids[at])]
        for t in range(22):
            assert torch.equal(changed[t], y[t]) == (not (at <= t < min(at + 4, end)))


def test_packed_gradients_do_not_see_each_other() -> None:
    segments = Segments.of([5, 1, 7])
    weight, dy = normal(4, 1, 4, seed=2), normal(13, 4, seed=3)
    grads = []
    for scale in (1.0, -3.0):
        x = normal(13, 4, seed=1)
        x[5:6] *= scale
        leaf = x.requires_grad_()
        grads.append(torch.autograd.grad(short_conv(leaf, weight, segments)[0], leaf, dy)[0])
    outside = torch.arange(13) != 5
    assert torch.equal(grads[0][outside], grads[1][outside])
    assert not torch.equal(grads[0], grads[1])


def test_bfloat16_is_summed_in_fp32() -> None:
    x, weight, tail = normal(40, 6, seed=1).bfloat16(), normal(6, 1, 4, seed=2).float(), normal(2, 6, 3, seed=3).bfloat16()
    y, new_tail = short_conv(x, weight, Segments.of([30, 10]), tail)
    wide, _ = short_conv(x.float(), weight, Segments.of([30, 10]), tail.float())
    assert y.dtype == new_tail.dtype == torch.bfloat16
    assert torch.equal(y, wide.bfloat16())


def test_many_sequences() -> None:
    segments = Segments.of([1] * 70_000)
    x, weight, tail = normal(70_000, 2, seed=1), normal(2, 1, 4, seed=2), normal(70_000, 2, 3, seed=3)
    y, new_tail = short_conv(x, weight, segments, tail)
    line = torch.cat([tail, x[:, :, None]], dim=2)
    assert worst(y, torch.nn.functional.silu((line * weight[:, 0]).sum(-1))) <= 1e-12
    assert torch.equal(new_tail, line[:, :, 1:])


def test_what_it_saves() -> None:
    x, weight, tail = normal(64, 8, seed=1).requires_grad_(), normal(8, 1, 4, seed=2).requires_grad_(), normal(1, 8, 3, seed=3)
    assert saved_bytes(lambda: short_conv(x, weight, Segments.of([64]), tail)) <= x.nbytes + weight.nbytes + tail.nbytes


def test_shapes_that_do_not_fit_are_named() -> None:
    x, weight = torch.zeros(5, 3), torch.zeros(3, 1, 4)
    with pytest.raises(ValueError, match=r"weight is \[D, 1, W\]"):
        short_conv(x, weight[:2], Segments.of([5]))
    with pytest.raises(ValueError, match=r"tail is \[N, D, W - 1\] = \[1, 3, 3\]"):
        short_conv(x, weight, Segments.of([5]), torch.zeros(1, 3, 4))
    with pytest.raises(ValueError, match="4 tokens, but the tensor has 5"):
        short_conv(x, weight, Segments.of([4]))
