"""Packed batches: each prediction once an epoch, in pieces of documents, the same stream after a resume."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openk3.errors import UserError
from openk3.text.corpus import Document
from openk3.text.token_file import HEADER_BYTES, TokenFile, encode_corpus
from openk3.train.batches import Batch, PackedBatches, heldout_batches
from tests.text.samples import CODE, PROSE, small

BOS, EOS = 393, 394


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    """Documents of 2 to 60 tokens and one of 500; no two neighbours in a document are followed alike."""
    draw = np.random.default_rng(0)
    lengths = [*draw.integers(0, 59, 40).tolist(), 498, 0, 0]
    return write(tmp_path_factory.mktemp("tokens") / "t.bin", lengths)


def write(path: Path, lengths: list[int]) -> TokenFile:
    draw = np.random.default_rng(len(lengths))
    return TokenFile.write(path, [draw.integers(0, 256, length).tolist() for length in lengths], small())


def predicted(batch: Batch) -> list[int]:
    """The index in the file of each target."""
    spans = zip(batch.positions, batch.segments.lengths, strict=True)
    return [n + 1 for position, length in spans for n in range(position, position + length)]


def check(file: TokenFile, batch: Batch, tokens: int, sequence_length: int) -> None:
    assert batch.tokens.shape == batch.targets.shape == (tokens,) and batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.segments.total == tokens and 1 <= min(batch.segments.lengths) and batch.segments.longest <= sequence_length
    indices = np.array(predicted(batch))
    assert batch.targets.tolist() == file.tokens[indices].tolist()
    assert batch.tokens.tolist() == file.tokens[indices - 1].tolist()
    assert len(batch.positions) == len(batch.documents) == batch.segments.count
    for position, document, length in zip(batch.positions, batch.documents, batch.segments.lengths, strict=True):
        assert file.offsets[document] <= position and position + length < file.offsets[document + 1]
    assert batch.text_bytes == sum(small().text_lengths[token] for token in batch.targets.tolist())


def same(a: Batch, b: Batch) -> bool:
    tensors = torch.equal(a.tokens, b.tokens) and torch.equal(a.targets, b.targets)
    return tensors and (a.segments.lengths, a.positions, a.documents, a.text_bytes, a.epoch) == (
        b.segments.lengths,
        b.positions,
        b.documents,
        b.text_bytes,
        b.epoch,
    )


def all_predictions(file: TokenFile) -> Counter[int]:
    return Counter(set(range(len(file.tokens))) - set(file.offsets[:-1].tolist()))


# The stream


def test_a_batch_by_hand(tmp_path: Path) -> None:
    tokens = TokenFile.write(tmp_path / "t.bin", [[10, 11, 12, 13, 14]], small())
    stream = PackedBatches(tokens.whole(), 4, 3)
    # Six predictions in units of three: BOS 10 11 -> 10 11 12, and 12 13 14 -> 13 14 EOS.
    first, second, third = stream.next(), stream.next(), stream.next()
    halves = {0: [BOS, 10, 11, 12], 3: [12, 13, 14, EOS]}
    a, b = (halves[n] for n in (first.positions[0], 3 - first.positions[0]))
    assert first.tokens.tolist() == a[:3] + b[:1] and first.targets.tolist() == a[1:] + b[1:2]
    assert first.segments.lengths == (3, 1) and first.documents == (0, 0)
    # The rest of the unit, then the next epoch begins.
    assert second.tokens.tolist()[:2] == b[1:3] and second.targets.tolist()[:2] == b[2:4] and second.segments.lengths == (2, 2)
    assert (first.epoch, second.epoch, third.epoch) == (0, 0, 1)
    assert sum(len(predicted(batch)) for batch in (first, second, third)) == 12
    assert Counter(predicted(first) + predicted(second) + predicted(third)) == Counter(dict.fromkeys(range(1, 7), 2))


@pytest.mark.parametrize(("tokens", "sequence_length"), [(3, 2), (7, 3), (64, 64), (64, 1000), (100, 16), (333, 50)])
def test_each_prediction_comes_once_an_epoch(file: TokenFile, tokens: int, sequence_length: int) -> None:
    stream = PackedBatches(file.whole(), tokens, sequence_length, seed=3)
    seen: list[int] = []
    while len(seen) < 2 * file.whole().predictions:
        batch = stream.next()
        check(file, batch, tokens, sequence_length)
        seen += predicted(batch)
    for epoch in range(2):
        count = file.whole().predictions
        assert Counter(seen[epoch * count : (epoch + 1) * count]) == all_predictions(file)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    tokens=st.integers(1, 50),
    sequence_length=st.integers(1, 40),
    seed=st.integers(-(2**63), 2**64),
    resume=st.integers(0, 5),
)
def test_any_documents_any_sizes(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], tokens: int, sequence_length: int, seed: int, resume: int
) -> None:
    file = write(tmp_path_factory.mktemp("any") / "t.bin", lengths)
    part = file.whole()
    tokens = min(tokens, part.predictions)
    stream = PackedBatches(part, tokens, sequence_length, seed=seed)
    batches = [stream.next() for _ in range(resume)]
    state = json.loads(json.dumps(stream.state_dict()))
    stream = PackedBatches(part, tokens, sequence_length, seed=seed)
    stream.load_state_dict(state)
    while sum(batch.segments.total for batch in batches) < 2 * part.predictions:
        batches.append(stream.next())
    for batch in batches:
        check(file, batch, tokens, sequence_length)
    seen = [n for batch in batches for n in predicted(batch)]
    assert Counter(seen[: part.predictions]) == Counter(seen[part.predictions : 2 * part.predictions]) == all_predictions(file)


def test_documents_begin_and_end(file: TokenFile) -> None:
    stream = PackedBatches(file.whole(), 100, 20)
    starts = ends = 0
    while stream.progress < 1:
        batch = stream.next()
        assert EOS not in batch.tokens and BOS not in batch.targets
        starts += int((batch.tokens == BOS).sum())
        ends += int((batch.targets == EOS).sum())
    assert starts >= file.documents and ends >= file.documents


def test_text_bytes_are_those_of_the_texts(tmp_path: Path) -> None:
    texts = [CODE, PROSE, "é👩", ""]
    file = encode_corpus([Document(text, "x") for text in texts], small(), tmp_path / "t.bin")
    total = sum(len(text.encode()) for text in texts)
    assert sum(batch.text_bytes for batch in heldout_batches(file.whole(), 50, 20)) == total
    stream = PackedBatches(file.whole(), file.whole().predictions, 20)
    assert [stream.next().text_bytes for _ in range(3)] == [total] * 3


def test_epochs_and_seeds_give_orders_of_their_own(file: TokenFile) -> None:
    whole = file.whole().predictions
    stream = PackedBatches(file.whole(), whole, 50, seed=1)
    orders = [stream.next().positions for _ in range(3)]
    orders += [PackedBatches(file.whole(), whole, 50, seed=seed).next().positions for seed in (2, -1, -2, 2**64 - 3)]
    assert len(set(orders)) == 7 and len({tuple(sorted(order)) for order in orders}) == 1
    assert PackedBatches(file.whole(), whole, 50, seed=1).next().positions == orders[0]
    # The pieces of the long document are spread out.
    long = [n for n, document in enumerate(stream.next().documents) if document == 40]
    assert len(long) == 10 and long[-1] - long[0] > 20


def test_the_order_is_the_same_for_ever(tmp_path: Path) -> None:
    # Philox 4x64 with key (7, 0) and (7, 1), sorted; a change here would break the resume of every run there is.
    file = write(tmp_path / "t.bin", [1] * 10)
    stream = PackedBatches(file.whole(), 20, 10, seed=7)
    expected = [[8, 4, 1, 6, 3, 2, 7, 5, 9, 0], [3, 9, 1, 6, 2, 5, 4, 8, 0, 7]]
    assert [list(stream.next().documents) for _ in range(2)] == expected


def test_progress(file: TokenFile) -> None:
    stream = PackedBatches(file.whole(), 100, 32)
    assert stream.progress == 0
    for n in range(1, 40):
        stream.next()
        assert stream.progress == pytest.approx(n * 100 / file.whole().predictions)


def test_a_part_stays_within_itself(file: TokenFile) -> None:
    train, heldout = file.split(0.2)
    stream = PackedBatches(train, 64, 32)
    seen = set()
    while stream.progress < 1:
        seen |= set(predicted(stream.next()))
    held = {n for batch in heldout_batches(heldout, 64, 32) for n in predicted(batch)}
    assert not seen & held and seen | held == set(all_predictions(file))


# Resume


@pytest.mark.parametrize(("tokens", "sequence_length"), [(64, 16), (333, 50), (1000, 1000)])
def test_a_resumed_stream_is_the_same(file: TokenFile, tokens: int, sequence_length: int) -> None:
    stream = PackedBatches(file.whole(), tokens, sequence_length, seed=5)
    states, batches = [], []
    for _ in range(30):
        states.append(json.dumps(stream.state_dict()))
        batches.append(stream.next())
    for n in (0, 1, 7, 13, 24, 25, 29):
        fresh = PackedBatches(file.whole(), tokens, sequence_length, seed=5)
        fresh.load_state_dict(json.loads(states[n]))
        assert json.dumps(fresh.state_dict()) == states[n]
        assert all(same(fresh.next(), batch) for batch in batches[n:])


def test_resuming_where_an_epoch_ends(file: TokenFile) -> None:
    whole = file.whole().predictions
    stream = PackedBatches(file.whole(), whole, 50)
    stream.next()
    state = stream.state_dict()
    assert (state["epoch"], state["offset"]) == (0, 0) and stream.progress == 1
    fresh = PackedBatches(file.whole(), whole, 50)
    fresh.load_state_dict(state)
    assert fresh.progress == 1 and same(fresh.next(), stream.next())


def test_a_resume_may_change_the_batch_and_loses_nothing(file: TokenFile) -> None:
    stream = PackedBatches(file.whole(), 100, 32)
    seen = [n for _ in range(5) for n in predicted(stream.next())]
    other = PackedBatches(file.whole(), 37, 32)
    other.load_state_dict(stream.state_dict())
    while len(seen) < file.whole().predictions:
        seen += predicted(other.next())
    assert Counter(seen[: file.whole().predictions]) == all_predictions(file)


def test_the_state_is_small(file: TokenFile) -> None:
    stream = PackedBatches(file.whole(), 100, 32)
    stream.next()
    state = stream.state_dict()
    assert {"epoch", "position", "offset"} < set(state) and len(json.dumps(state)) < 300


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "0" * 64}, "another text or held-out share: its data is 0000"),
        ({"seed": 9}, "another seed: its seed is 9, not 0"),
        ({"sequence_length": 31}, "another sequence length: its sequence_length is 31, not 32"),
        ({"epoch": -1}, "damaged: epoch -1"),
        ({"epoch": 1.0}, "damaged"),
        ({"epoch": 1 << 70}, "damaged"),
        ({"position": 10_000}, "damaged: epoch 0, position 10000"),
        ({"position": True}, "damaged"),
        ({"offset": 32}, "offset 32"),
        ({"offset": None}, "damaged"),
        ({"more": 1}, "damaged: it has"),
    ],
)
def test_a_state_that_does_not_fit(file: TokenFile, change: dict[str, Any], message: str) -> None:
    stream = PackedBatches(file.whole(), 100, 32)
    stream.next()
    before = stream.state_dict()
    with pytest.raises(UserError, match=f"position in the data .*{message}"):
        stream.load_state_dict(before | change)
    assert stream.state_dict() == before
    with pytest.raises(UserError, match="damaged: it has"):
        stream.load_state_dict({"epoch": 0})


def test_another_share_is_other_data(file: TokenFile) -> None:
    state = PackedBatches(file.split(0.1)[0], 64, 32).state_dict()
    with pytest.raises(UserError, match="another text or held-out share"):
        PackedBatches(file.split(0.2)[0], 64, 32).load_state_dict(state)


# Held-out


@pytest.mark.parametrize(("tokens", "sequence_length"), [(1, 5), (64, 16), (50, 1000), (10**6, 20)])
def test_held_out_batches_cover_the_part_once(file: TokenFile, tokens: int, sequence_length: int) -> None:
    part = file.split(0.3)[1]
    batches = list(heldout_batches(part, tokens, sequence_length))
    assert [batch.segments.total for batch in batches[:-1]] == [tokens] * (len(batches) - 1)
    for batch in batches:
        check(file, batch, batch.segments.total, sequence_length)
    seen = [n for batch in batches for n in predicted(batch)]
    assert len(seen) == len(set(seen)) == part.predictions
    again = list(heldout_batches(part, tokens, sequence_length))
    assert all(same(a, b) for a, b in zip(batches, again, strict=True))


def test_the_first_held_out_tokens(file: TokenFile) -> None:
    part = file.whole()
    some = list(heldout_batches(part, 64, 32, max_tokens=150))
    assert [batch.segments.total for batch in some] == [64, 64, 22]
    whole = list(heldout_batches(part, 64, 32))
    assert all(same(a, b) for a, b in zip(some[:2], whole, strict=False))
    # A sample from everywhere, not the first documents.
    assert len({document for batch in some for document in batch.documents}) > 4 and min(some[0].documents) < 20 < max(some[0].documents)
    assert [batch.segments.total for batch in heldout_batches(part, 64, 32, max_tokens=10**9)] == [batch.segments.total for batch in whole]


# Faults


def test_less_text_than_a_batch(tmp_path: Path) -> None:
    file = write(tmp_path / "t.bin", [50, 48])
    assert PackedBatches(file.whole(), 100, 10).next().segments.total == 100
    with pytest.raises(UserError, match=r"t\.bin has 100 tokens to train on, less than one batch of 101: give more text"):
        PackedBatches(file.whole(), 101, 10)


@pytest.mark.parametrize(("tokens", "sequence_length"), [(0, 5), (5, 0), (-1, 5)])
def test_sizes_that_are_none(file: TokenFile, tokens: int, sequence_length: int) -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        PackedBatches(file.whole(), tokens, sequence_length)
    with pytest.raises(ValueError, match="must be 1 or more"):
        next(heldout_batches(file.whole(), tokens, sequence_length))


def test_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    path = write(tmp_path / "t.bin", [50]).path
    data = bytearray(path.read_bytes())
    data[HEADER_BYTES + 21] = 0xFF
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"t\.bin is damaged: it holds token ids outside its vocabulary"):
        PackedBatches(TokenFile.open(path).whole(), 51, 51).next()


def test_a_batch_costs_little(tmp_path: Path) -> None:
    file = write(tmp_path / "t.bin", [*[20] * 3000, 100_000])
    stream = PackedBatches(file.whole(), 8192, 1024)
    fastest = 1.0
    for _ in range(15):
        start = time.perf_counter()
        stream.next()
        fastest = min(fastest, time.perf_counter() - start)
    # About 0.2 ms on an idle machine.
    assert fastest < 5e-3
