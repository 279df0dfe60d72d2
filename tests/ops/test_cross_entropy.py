"""The blockwise loss against torch's own, and against numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from openk3.ops import cross_entropy
from openk3.ops.cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from tests.ops.compare import assert_same_op, generator, normal, saved_bytes, value_and_gradients
from tests.support import relative, worst

FORMS = [linear_cross_entropy, linear_cross_entropy_reference]


def case(tokens: int, vocabulary: int, ignored: float = 0.3, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden, weight, targets, token weights."""
    targets = torch.randint(vocabulary, (tokens,), generator=generator(3))
    targets[torch.rand(tokens, generator=generator(4)) < ignored] = -100
    token_weights = torch.rand(tokens, generator=generator(5))
    return normal(tokens, 7, seed=1, dtype=dtype), normal(vocabulary, 7, seed=2, dtype=dtype), targets, token_weights


def torchs_own(hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor | None = None) -> Tensor:
    losses = F.cross_entropy(F.linear(hidden, weight), targets, ignore_index=-100, reduction="none")
    return (losses if token_weights is None else losses * token_weights).sum()


@pytest.mark.parametrize("form", FORMS)
def test_by_hand(form) -> None:
    hidden = torch.tensor([[1.0], [0.0], [2.0]], dtype=torch.float64)
    weight = torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    total, per_token = form(hidden, weight, torch.tensor([1, 0, -1]), torch.tensor([2.0, 1.0, 5.0]))
    assert per_token.tolist() == pytest.approx([math.log(4 / 3), math.log(2), 0.0], abs=1e-15)
    assert float(total) == pytest.approx(2 * math.log(4 / 3) + math.log(2), abs=1e-15)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tokens, vocabulary, rows", [(1, 1, None), (1, 5, None), (23, 11, None), (23, 11, 1), (23, 11, 4), (64, 300, 100)])
def test_torchs_own(form, tokens: int, vocabulary: int, rows: int | None, weighted: bool) -> None:
    hidden, weight, targets, token_weights = case(tokens, vocabulary)
    given = token_weights if weighted else None
    ours = value_and_gradients(lambda h, w: 1.5 * form(h, w, targets, given, rows=rows).total, hidden, weight)
    theirs = value_and_gradients(lambda h, w: 1.5 * torchs_own(h, w, targets, given), hidden, weight)
    for one, other in zip(ours, theirs, strict=True):
        assert worst(one, other) < 1e-12
    losses = F.cross_entropy(F.linear(hidden, weight), targets, reduction="none")
    assert worst(form(hidden, weight, targets, given, rows=rows).per_token, losses) < 1e-12


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 6e-2)])
def test_fast_is_reference_in_narrower_dtypes(dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, targets, token_weights = case(150, 90, dtype=dtype)

    def total_of(form):
        return lambda h, w: form(h, w, targets, token_weights, rows=32).total

    assert linear_cross_entropy(hidden, weight, targets).total.dtype == torch.float32
    assert_same_op(total_of(linear_cross_entropy), total_of(linear_cross_entropy_reference), [hidden, weight], tolerance)


def test_a_bf16_hidden_under_a_fp32_head() -> None:
    hidden, weight, targets, _ = case(40, 30, dtype=torch.float32)
    exact = value_and_gradients(
        lambda h, w: linear_cross_entropy(h, w, targets).total, hidden.bfloat16().float(), weight.bfloat16().float()
    )
    narrow = value_and_gradients(lambda h, w: linear_cross_entropy(h, w, targets).total, hidden.bfloat16(), weight)
    assert [tensor.dtype for tensor in narrow] == [torch.float32, torch.bfloat16, torch.float32]
    for one, other in zip(narrow, exact, strict=True):
        assert relative(one, other) < 4e-2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [0, 5])
def test_nothing_to_predict_is_zero_and_not_nan(form, tokens: int) -> None:
    hidden, weight, _, _ = case(tokens, 9)
    targets = torch.full((tokens,), -1)
    total, dhidden, dweight = value_and_gradients(lambda h, w: form(h, w, targets).total, hidden, weight)
    assert float(total) == 0.0 and not dhidden.any() and not dweight.any()
    assert form(hidden, weight, targets).per_token.tolist() == [0.0] * tokens


def test_ignored_rows_are_not_even_read() -> None:
    hidden, weight, targets, token_weights = case(20, 9)
    expected = value_and_gradients(lambda h, w: linear_cross_entropy(h, w, targets, token_weights).total, hidden, weight)
    hidden[targets < 0] = float("nan")
    got = value_and_gradients(lambda h, w: linear_cross_entropy(h, w, targets, token_weights).total, hidden, weight)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1e2, 1e4, 1e30])
def test_large_logits(form, size: float) -> None:
    hidden, weight = torch.tensor([[size]]), torch.tensor([[1.0], [-1.0], [0.5]])
    for target, expected in ((0, 0.0), (1, 2 * size)):
        total, dhidden, _ = value_and_gradients(lambda h, w, t=target: form(h, w, torch.tensor([t])).total, hidden, weight)
        assert float(total) == pytest.approx(expected, rel=1e-6) and bool(torch.isfinite(dhidden).all())


def test_a_confident_prediction_keeps_its_digits() -> None:
    # −log σ(12) = 6.1442e-6: the difference of two numbers near 12 in fp32 would leave three digits of it.
    loss = linear_cross_entropy(torch.tensor([[6.0]]), torch.tensor([[1.0], [-1.0]]), torch.tensor([0])).total
    assert float(loss) == pytest.approx(math.log1p(math.exp(-12)), rel=0.02)


def test_gradcheck() -> None:
    hidden, weight, targets, token_weights = case(6, 5)
    inputs = (hidden.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, targets, token_weights, rows=4).total, inputs)


def test_only_the_wanted_gradients() -> None:
    hidden, weight, targets, _ = case(12, 6)
    both = value_and_gradients(lambda h, w: linear_cross_entropy(h, w, targets).total, hidden, weight)
    weight.requires_grad_()
    linear_cross_entropy(hidden, weight, targets).total.backward()
    assert weight.grad is not None and worst(weight.grad * float(normal(seed=99)), both[2]) < 1e-12
    assert not linear_cross_entropy(hidden, weight.detach(), targets).total.requires_grad


def test_logits_are_never_all_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets, _ = case(500, 40)
    seen: list[int] = []
    product = cross_entropy._product

    def watched(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        seen.append(out.numel())
        return product(a, b, out)

    monkeypatch.setattr(cross_entropy, "_product", watched)
    monkeypatch.setattr(cross_entropy, "_MOST_LOGITS", 4000)
    monkeypatch.setattr(cross_entropy, "_SMALL_LOGITS", 0)
    before = linear_cross_entropy(hidden, weight, targets).total
    assert max(seen) == 4000 and len(seen) > 1
    assert worst(before, torchs_own(hidden, weight, targets)) < 1e-10


@pytest.mark.parametrize("grad", [True, False])
def test_no_logits_are_saved(grad: bool) -> None:
    hidden, weight, targets, _ = case(300, 50, dtype=torch.float32)
    with torch.set_grad_enabled(grad):
        kept = saved_bytes(lambda: linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), targets).total)
    assert kept <= (4 * (hidden.numel() + weight.numel()) if grad else 0)


def test_a_row_depends_on_itself_alone() -> None:
    hidden, weight, targets, _ = case(40, 30, ignored=0.0, dtype=torch.float32)
    before = value_and_gradients(lambda h: linear_cross_entropy(h, weight, targets).total, hidden)[1]
    losses = linear_cross_entropy(hidden, weight, targets).per_token
    hidden[:9], targets[:9] = 3.0, 2
    after = value_and_gradients(lambda h: linear_cross_entropy(h, weight, targets).total, hidden)[1]
    assert torch.equal(before[9:], after[9:]) and torch.equal(linear_cross_entropy(hidden, weight, targets).per_token[9:], losses[9:])


def test_per_token_is_detached_and_unweighted() -> None:
    hidden, weight, targets, token_weights = case(10, 6)
    terms = linear_cross_entropy(hidden.requires_grad_(), weight.requires_grad_(), targets, token_weights)
    assert terms.total.requires_grad and not terms.per_token.requires_grad
    assert worst((terms.per_token * token_weights).sum(), terms.total.detach()) < 1e-13


@pytest.mark.parametrize("form", FORMS[:1])
def test_refusals(form) -> None:
    hidden, weight, targets, token_weights = case(6, 5, ignored=0.0)
    wrong = targets.clone()
    wrong[3] = 5
    with pytest.raises(ValueError, match="target 5 at position 3 is outside the vocabulary of 5"):
        form(hidden, weight, wrong)
    with pytest.raises(ValueError, match="do not fit"):
        form(hidden, weight[:, :4], targets)
    with pytest.raises(ValueError, match="6 tokens"):
        form(hidden, weight, targets, token_weights[:2])
    with pytest.raises(ValueError, match="rows is 0"):
        form(hidden, weight, targets, rows=0)
