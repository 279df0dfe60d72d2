"""Ragged attention, expanded and absorbed, against the formula and by perturbation."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from openk3.ops import attention
from openk3.ops.attention import absorbed_attention, causal_attention, causal_attention_reference
from openk3.ops.segments import Segments
from tests.ops.compare import assert_same_op, normal, saved_bytes, threads, value_and_gradients
from tests.support import relative, worst

RAGGED = ([5, 3, 0, 1, 7, 5, 130, 5], [5, 3, 2, 4, 9, 5, 300, 6])


def qkv(
    new: list[int], keys: list[int], heads: int = 2, width: int = 6, value: int = 4, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    tokens, seen = sum(new), sum(keys)
    return [
        normal(tokens, heads, width, seed=1, dtype=dtype),
        normal(seen, heads, width, seed=2, dtype=dtype),
        normal(seen, heads, value, seed=3, dtype=dtype),
    ]


def op_of(form, new: list[int], keys: list[int], scale: float = 0.4):
    segments, context = Segments.of(new), Segments.of(keys)
    return lambda q, k, v: form(q, k, v, segments, context, scale)


@pytest.mark.parametrize("form", [causal_attention, causal_attention_reference])
def test_by_hand(form) -> None:
    # One head. The second token's scores are 0 and ln 3 (scale 1), so it mixes 1/4 and 3/4.
    q = torch.tensor([1.0, 1.0], dtype=torch.float64).view(2, 1, 1)
    k = torch.tensor([0.0, math.log(3)], dtype=torch.float64).view(2, 1, 1)
    v = torch.tensor([[8.0, 0.0], [0.0, 4.0]], dtype=torch.float64).view(2, 1, 2)
    out = form(q, k, v, Segments.of([2]), Segments.of([2]), 1.0)
    assert worst(out.flatten(1), torch.tensor([[8.0, 0.0], [2.0, 3.0]])) < 1e-12


def test_torchs_own_attention_agrees() -> None:
    q, k, v = qkv([37], [37], heads=3)
    theirs = F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), is_causal=True, scale=0.4)
    assert worst(op_of(causal_attention, [37], [37])(q, k, v), theirs[0].transpose(0, 1)) < 1e-13


@pytest.mark.parametrize("new, keys", [RAGGED, ([], []), ([0], [3]), ([1], [1]), ([3] * 7, [8] * 7), ([16] * 3, [16] * 3), ([300], [300])])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 8e-2)])
def test_fast_is_reference(new: list[int], keys: list[int], dtype: torch.dtype, tolerance: float) -> None:
    assert_same_op(op_of(causal_attention, new, keys), op_of(causal_attention_reference, new, keys), qkv(new, keys, dtype=dtype), tolerance)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), max_size=8), st.integers(1, 3))
def test_fast_is_reference_for_any_lengths(lengths: list[tuple[int, int]], heads: int) -> None:
    new, keys = [length for length, _ in lengths], [length + past for length, past in lengths]
    assert_same_op(op_of(causal_attention, new, keys), op_of(causal_attention_reference, new, keys), qkv(new, keys, heads), 1e-11)


@pytest.mark.parametrize("rows, scores", [(1, 1), (3, 50), (7, 10_000), (64, 700)])
def test_any_block_size_gives_the_same(rows: int, scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given, plain = qkv(*RAGGED, heads=3), op_of(causal_attention_reference, *RAGGED)
    monkeypatch.setattr(attention, "_ROWS", rows)
    monkeypatch.setattr(attention, "_FEWEST_ROWS", 1)
    monkeypatch.setattr(attention, "_SCORES", scores)
    assert_same_op(op_of(causal_attention, *RAGGED), plain, given, 1e-12)


def test_a_lone_token_gives_its_query_no_gradient_in_bf16_either() -> None:
    """Its probability is 1 whatever the score; what is left here would be the rounding bias that drifts a training run."""
    _, dq, dk, _ = value_and_gradients(op_of(causal_attention, [1] * 50, [1] * 50), *qkv([1] * 50, [1] * 50, dtype=torch.bfloat16))
    assert not dq.any() and not dk.any()


def test_gradcheck() -> None:
    inputs = [tensor.requires_grad_() for tensor in qkv([3, 1, 3], [4, 2, 4])]
    assert torch.autograd.gradcheck(op_of(causal_attention, [3, 1, 3], [4, 2, 4]), inputs)


def test_nothing_depends_on_the_future() -> None:
    new = [40, 9]
    q, k, v = qkv(new, new)
    run = op_of(causal_attention, new, new)
    for at in (0, 1, 17, 39):
        for which in range(3):
            changed = [q.clone(), k.clone(), v.clone()]
            changed[which][at] += 3.0
            before, after = run(q, k, v), run(*changed)
            assert torch.equal(after[:at], before[:at]) and torch.equal(after[40:], before[40:])
            if at or which:  # a first token has one key, whatever its query
                assert not torch.equal(after[at:40], before[at:40])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("new", [[30, 41], [25, 25], [5] * 12, [1, 70, 1, 64]])
def test_packed_documents_do_not_see_each_other(new: list[int], dtype: torch.dtype, count: int) -> None:
    """To the bit, outputs and gradients: the first document is replaced by other numbers."""
    run, first = op_of(causal_attention, new, new), new[0]
    one, other = qkv(new, new, dtype=dtype, width=24, value=16), qkv(new, new, dtype=dtype, width=24, value=16)
    for tensor in other:
        tensor[:first] = tensor[:first].flip(0) * 7
    with threads(count):
        before, after = value_and_gradients(run, *one), value_and_gradients(run, *other)
    assert not torch.equal(before[0][:first], after[0][:first])
    for one_way, the_other in zip(before, after, strict=True):
        assert torch.equal(one_way[first:], the_other[first:])


@pytest.mark.parametrize("split", [1, 3, 16, 64, 129])
def test_chunked_prefill_is_one_call(split: int) -> None:
    q, k, v = qkv([130], [130])
    whole = op_of(causal_attention, [130], [130])(q, k, v)
    for start in range(0, 130, split):
        end = min(130, start + split)
        part = op_of(causal_attention, [end - start], [end])(q[start:end], k[:end], v[:end])
        assert worst(part, whole[start:end]) < 1e-13


def test_a_lone_key_is_returned_whatever_its_score() -> None:
    q, k, v = (torch.full((1, 1, 2), value) for value in (1e19, 1e19, 3.0))
    assert causal_attention(q, k, v, Segments.of([1]), Segments.of([1]), 1.0).tolist() == [[[3.0, 3.0]]]


@pytest.mark.parametrize("length", [64, 512])
def test_only_q_k_and_v_are_saved(length: int) -> None:
    inputs = [tensor.requires_grad_() for tensor in qkv([length], [length], dtype=torch.float32)]
    assert saved_bytes(lambda: op_of(causal_attention, [length], [length])(*inputs)) == 4 * length * 2 * (6 + 6 + 4)


def test_many_short_sequences_are_not_many_calls() -> None:
    """800 documents of 5 tokens cost little more than 8 of 500: both are 4000 tokens."""

    def seconds(new: list[int]) -> float:
        given, run = qkv(new, new, dtype=torch.float32, width=24, value=16), op_of(causal_attention, new, new)
        times = []
        for _ in range(4):
            start = time.process_time()
            run(*given)
            times.append(time.process_time() - start)
        return min(times)

    with threads(1):
        assert seconds([5] * 800) < 3 * seconds([500] * 8)


def test_refusals() -> None:
    q, k, v = qkv([2, 3], [2, 3])
    two, five = Segments.of([2, 3]), Segments.of([5])
    with pytest.raises(ValueError, match="sequence 0 has 3 new tokens, but its context holds only 2"):
        causal_attention(q, k, v, Segments.of([3, 2]), two, 1.0)
    with pytest.raises(ValueError, match="contexts"):
        causal_attention(q, k, v, two, five, 1.0)
    with pytest.raises(ValueError, match="5 tokens"):
        causal_attention(q[:4], k, v, two, two, 1.0)
    with pytest.raises(ValueError, match="do not fit"):
        causal_attention(q, k[..., :3], v, two, two, 1.0)


def absorbed_case(new: list[int], keys: list[int], dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor]]:
    q = normal(sum(new), 3, 9, seed=4, dtype=dtype)
    return q, [normal(length, 9, seed=5 + n, dtype=dtype) for n, length in enumerate(keys)]


@pytest.mark.parametrize("new, keys", [RAGGED, ([], []), ([1, 1, 1], [1, 80, 7]), ([0, 4], [3, 4])])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_absorbed_is_attention_over_one_shared_key(new: list[int], keys: list[int], dtype: torch.dtype, tolerance: float) -> None:
    q, latents = absorbed_case(new, keys, dtype)
    out = absorbed_attention(q, latents, Segments.of(new), 7, 0.3)
    assert out.dtype == dtype
    joined = torch.cat([*latents, q[:0, 0]]).double()[:, None].expand(-1, 3, -1)
    plain = causal_attention_reference(q.double(), joined, joined[..., :7], Segments.of(new), Segments.of(keys), 0.3)
    assert relative(out, plain) <= tolerance


def test_absorbed_in_small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    q, latents = absorbed_case(*RAGGED)
    whole = absorbed_attention(q, latents, Segments.of(RAGGED[0]), 7, 0.3)
    monkeypatch.setattr(attention, "_SCORES", 2000)
    assert worst(absorbed_attention(q, latents, Segments.of(RAGGED[0]), 7, 0.3), whole) < 1e-14


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_absorbed_sequences_do_not_depend_on_their_neighbours(dtype: torch.dtype) -> None:
    new, keys = RAGGED
    q, latents = absorbed_case(new, keys, dtype)
    together = absorbed_attention(q, latents, Segments.of(new), 7, 0.3).split(new)
    for alone, part, latent in zip(together, q.split(new), latents, strict=True):
        assert torch.equal(absorbed_attention(part, [latent], Segments.of([part.shape[0]]), 7, 0.3), alone)


def test_absorbed_with_latents_of_another_dtype() -> None:
    q, latents = absorbed_case([2, 1], [5, 3])
    exact = absorbed_attention(q, latents, Segments.of([2, 1]), 7, 0.3)
    wide_latents = absorbed_attention(q.bfloat16(), latents, Segments.of([2, 1]), 7, 0.3)
    narrow_latents = absorbed_attention(q, [latent.bfloat16() for latent in latents], Segments.of([2, 1]), 7, 0.3)
    assert wide_latents.dtype == torch.bfloat16 and narrow_latents.dtype == torch.float64
    assert relative(wide_latents, exact) < 3e-2 and relative(narrow_latents, exact) < 3e-2


def test_absorbed_refusals() -> None:
    q, latents = absorbed_case([2], [3])
    with pytest.raises(ValueError, match="sequences"):
        absorbed_attention(q, latents, Segments.of([1, 1]), 7, 1.0)
    with pytest.raises(ValueError, match="2 new tokens"):
        absorbed_attention(q, [latents[0][:1]], Segments.of([2]), 7, 1.0)
