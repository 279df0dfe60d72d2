"""Any split of a prompt into calls, and any mix of sequences in one call, gives the same logits and the same state as one call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from openk3 import Decoder, DecoderState, ModelConfig, Segments
from openk3.model.mla import MLA
from openk3.model.state import LatentMemory, RecurrentMemory
from tests.support import worst

EXACT = 1e-9
PROMPT = 130


KIMI_LINEAR = {
    "family": "kimi_linear",
    "attn_res_block_size": None,
    "latent_size": None,
    "latent_norm": False,
    "activation": "silu",
    "kda_gate_lower_bound": None,
    "kda_full_rank_gate": False,
    "mla_output_gate": False,
    "q_lora_rank": None,
    "num_layers": 5,
    "mla_layers": (3,),
}
SHALLOW = {"num_layers": 5, "mla_layers": (3, 4), "attn_res_block_size": 2}
"""Two full AttnRes blocks and a short one, every kind of layer: as debug13, in fewer layers."""


@pytest.fixture(scope="module", params=["k3", "kimi-linear", pytest.param("debug13", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    changes: dict[str, object] = {"k3": SHALLOW, "kimi-linear": KIMI_LINEAR, "debug13": {}}[request.param]
    config = ModelConfig.named("debug13").replace(**changes)
    yield Decoder(config, generator=torch.Generator().manual_seed(0)).double().eval()


def tokens_of(model: Decoder, count: int, seed: int = 1) -> Tensor:
    return torch.randint(0, model.config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def fresh(model: Decoder, sequences: int = 1) -> DecoderState:
    return DecoderState.empty(model.config, sequences=sequences, dtype=torch.float64)


def assert_same_state(actual: DecoderState, expected: DecoderState) -> None:
    assert actual.lengths == expected.lengths
    for a, e in zip(actual.layers, expected.layers, strict=True):
        if isinstance(a, RecurrentMemory):
            assert isinstance(e, RecurrentMemory)
            assert worst(a.recurrent, e.recurrent) < EXACT
            for x, y in zip(a.tails, e.tails, strict=True):
                assert worst(x, y) < EXACT
        else:
            assert isinstance(e, LatentMemory)
            for n, length in enumerate(a.lengths):
                assert length == e.lengths[n]
                assert worst(a.buffers[n][:length], e.buffers[n][:length]) < EXACT


@torch.no_grad()
def in_calls(model: Decoder, tokens: Tensor, lengths: list[int]) -> tuple[Tensor, DecoderState]:
    state = fresh(model)
    logits = [model(piece, Segments.of([piece.shape[0]]), state).logits for piece in tokens.split(lengths)]
    return torch.cat(logits), state


@torch.no_grad()
def test_every_split_point(model: Decoder) -> None:
    tokens = tokens_of(model, PROMPT)
    whole, state = in_calls(model, tokens, [PROMPT])
    assert worst(model(tokens, Segments.of([PROMPT])).logits, whole) < EXACT, "with and without a state"
    for split in range(1, PROMPT):
        logits, ended = in_calls(model, tokens, [split, PROMPT - split])
        assert worst(logits, whole) < EXACT, f"split at {split}"
        assert_same_state(ended, state)


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_chunks_of(model: Decoder, chunk: int) -> None:
    tokens = tokens_of(model, PROMPT)
    whole, state = in_calls(model, tokens, [PROMPT])
    lengths = [chunk] * (PROMPT // chunk) + ([PROMPT % chunk] if PROMPT % chunk else [])
    logits, ended = in_calls(model, tokens, lengths)
    assert worst(logits, whole) < EXACT
    assert_same_state(ended, state)


@torch.no_grad()
def test_prefill_and_decode_mixed_in_one_call(model: Decoder) -> None:
    """Sequences join, decode, pause and prefill in chunks within the same calls; each equals its own run."""
    texts = [tokens_of(model, n, seed=n) for n in (70, 33, 21, 5)]
    alone = [in_calls(model, text, [len(text)]) for text in texts]
    plan = [(40, 1, 0, 0), (1, 1, 16, 1), (1, 0, 1, 1), (27, 30, 1, 2), (1, 1, 3, 1)]
    state, taken = fresh(model, 4), [0, 0, 0, 0]
    seen: list[list[Tensor]] = [[], [], [], []]
    for lengths in plan:
        pieces = [texts[n][taken[n] : taken[n] + length] for n, length in enumerate(lengths)]
        out = model(torch.cat(pieces), Segments.of(lengths), state).logits
        for n, part in enumerate(out.split(list(lengths))):
            seen[n].append(part)
            taken[n] += lengths[n]
    assert state.lengths == taken == [70, 33, 21, 5]
    for n, (logits, ended) in enumerate(alone):
        assert worst(torch.cat(seen[n]), logits) < EXACT
        assert_same_state(state.select([n]), ended)


@torch.no_grad()
def test_both_forms_of_mla_give_the_same_numbers(model: Decoder) -> None:
    tokens = tokens_of(model, 40)
    results = []
    for absorb in (False, True, None):
        for module in model.modules():
            if isinstance(module, MLA):
                module.absorb = absorb
        results.append(torch.cat([in_calls(model, tokens, [25, 1, 1, 13])[0]]))
    assert worst(results[0], results[1]) < EXACT
    assert worst(results[0], results[2]) < EXACT


@torch.no_grad()
def test_last_logits_and_empty_segments(model: Decoder) -> None:
    tokens = tokens_of(model, 12)
    every = model(tokens, Segments.of([5, 0, 7]), fresh(model, 3)).logits
    last = model(tokens, Segments.of([5, 0, 7]), fresh(model, 3), logits="last").logits
    assert last.shape == (3, model.config.vocab_size)
    assert worst(last[[0, 2]], every[[4, 11]]) < EXACT
    assert not last[1].any()
    nothing = model(tokens[:0], Segments.of([]), fresh(model, 0))
    assert nothing.logits.shape == (0, model.config.vocab_size)


@torch.no_grad()
def test_selected_sequences_go_on_alone(model: Decoder) -> None:
    state = fresh(model, 3)
    texts = [tokens_of(model, n, seed=n) for n in (9, 14, 20)]
    model(torch.cat(texts), Segments.of([9, 14, 20]), state)
    some, more = state.select([2, 0]), tokens_of(model, 2, seed=5)
    logits = model(more, Segments.of([1, 1]), some).logits
    expected = in_calls(model, torch.cat([texts[2], more[:1]]), [21])[0][-1]
    assert worst(logits[0], expected) < EXACT
    assert state.lengths == [9, 14, 20] and some.lengths == [21, 10]
    again = model(more[:1], Segments.of([1]), state.select([2])).logits
    assert worst(again[0], expected) < EXACT, "the first state was left alone"


def test_gradients_flow_through_a_carried_state(model: Decoder) -> None:
    """Calls of 1, 2 and 3 tokens with a carried state have the gradients of one call."""
    tokens = tokens_of(model, 9)
    weights = torch.randn(9, model.config.vocab_size, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    grads = []
    for lengths in ([9], [1, 2, 3, 3]):
        model.zero_grad()
        state, total = fresh(model), torch.zeros((), dtype=torch.float64)
        for piece, weight in zip(tokens.split(lengths), weights.split(lengths), strict=True):
            total = total + (model(piece, Segments.of([len(piece)]), state).logits * weight).sum()
        total.backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        assert worst(grads[1][name], grad) < EXACT * max(1.0, float(grad.abs().max())), name


def test_what_does_not_fit_is_refused_before_anything_advances(model: Decoder) -> None:
    tokens, segments = tokens_of(model, 4), Segments.of([4])
    other = DecoderState.empty(model.config.replace(kda_head_dim=8), sequences=1, dtype=torch.float64)
    for arguments, complaint in (
        ((tokens, Segments.of([3])), "segments hold 3 tokens"),
        ((tokens, segments, fresh(model, 2)), "2 sequences"),
        ((tokens, segments, other), "another config"),
        ((tokens.float(), segments), "integers"),
        (([1, 2, 3, 4], segments), "not list"),
        ((tokens + model.config.vocab_size, segments), "outside the vocabulary"),
    ):
        with pytest.raises(ValueError, match=complaint):
            model(*arguments)
    assert other.lengths == [0]
