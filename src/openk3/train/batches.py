"""Ragged training batches: pieces of documents end to end, exactly as many tokens as asked for, each prediction once an epoch.

A range of n tokens (`Part`) asks for n - 1 predictions. Ranges are cut into units of at most `sequence_length` predictions; each epoch takes
the units in a new order, and a batch takes the next `tokens_per_batch` predictions of that stream. What a batch cuts off begins the next one, as
a piece of its own. The last token of a piece predicts the token that follows it in its document, so every position has a target.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openk3.errors import UserError
from openk3.ops.segments import Segments
from openk3.text.token_file import Ints, Part


@dataclass(frozen=True)
class Batch:
    """T predictions in N pieces; the state is reset where a piece begins."""

    tokens: Tensor
    """int64 `[T]`."""
    targets: Tensor
    """int64 `[T]`, the token that follows each."""
    segments: Segments
    positions: tuple[int, ...]
    """For each piece the index of its first token in the file; N values."""
    documents: tuple[int, ...]
    """For each piece the index of its document."""
    text_bytes: int
    """Bytes of text that the targets stand for: bits per byte = loss in nats · T / (ln 2 · text_bytes)."""
    epoch: int
    """The epoch that the first piece belongs to."""


class PackedBatches:
    """An endless stream of batches over a part of a token file, its position kept in three numbers."""

    def __init__(self, part: Part, tokens_per_batch: int, sequence_length: int, *, seed: int = 0) -> None:
        """Raises UserError when the part holds less than one batch."""
        if tokens_per_batch < 1 or sequence_length < 1:
            raise ValueError(f"tokens_per_batch is {tokens_per_batch}, sequence_length {sequence_length}: both must be 1 or more")
        if part.predictions < tokens_per_batch:
            raise UserError(
                f"{part.file.path} has {part.predictions:,} tokens to train on, less than one batch of {tokens_per_batch:,}: "
                "give more text, or make the batch smaller"
            )
        self.part = part
        self.tokens_per_batch = tokens_per_batch
        self.sequence_length = sequence_length
        self.seed = seed
        self._starts, self._lengths = _units(part, sequence_length)
        self._begin(0)

    @property
    def epoch(self) -> int:
        """Whole passes over the part so far."""
        return self._epoch

    @property
    def progress(self) -> float:
        """Passes over the part so far, with the fraction of the present one."""
        return self._epoch + self._consumed / self.part.predictions

    def next(self) -> Batch:
        """The next `tokens_per_batch` predictions."""
        epoch = self._epoch
        starts, lengths = [], []
        missing = self.tokens_per_batch
        while missing:
            if self._consumed == self.part.predictions:
                self._begin(self._epoch + 1)
            until = min(self._consumed + missing, self.part.predictions)
            first, last = np.searchsorted(self._ends, [self._consumed, until - 1], side="right")
            units = self._order[first : last + 1]
            unit_starts, unit_lengths = self._starts[units], self._lengths[units]
            unit_lengths[-1] -= self._ends[last] - until
            skipped = self._consumed - (self._ends[first] - self._lengths[units[0]])
            unit_starts[0] += skipped
            unit_lengths[0] -= skipped
            starts.append(unit_starts)
            lengths.append(unit_lengths)
            missing -= until - self._consumed
            self._consumed = until
        return _batch(self.part, np.concatenate(starts), np.concatenate(lengths), epoch)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.next()

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands; JSON holds it. With it, what it must be resumed with: data, seed and sequence length."""
        position = int(np.searchsorted(self._ends, self._consumed, side="right"))
        return {
            "epoch": self._epoch,
            "position": position,
            "offset": self._consumed - (int(self._ends[position - 1]) if position else 0),
            "seed": self.seed,
            "sequence_length": self.sequence_length,
            "data": self.part.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state` was taken; the batches that follow are those that followed there, bit for bit.

        Raises UserError when the state is of other data, another seed or another sequence length, or is no state at all.
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise UserError(f"the position in the data has the keys {sorted(state)}, not {sorted(own)}")
        for name, what in (("data", "text"), ("seed", "seed"), ("sequence_length", "sequence length")):
            if state[name] != own[name]:
                raise UserError(f"the position in the data was taken with another {what} ({state[name]}, not {own[name]})")
        epoch, position, offset = state["epoch"], state["position"], state["offset"]
        whole = all(type(value) is int and value >= 0 for value in (epoch, position, offset))
        if not whole or position > len(self._lengths):
            raise UserError(f"the position in the data is damaged: {dict(state)}")
        self._begin(epoch)
        if offset and (position == len(self._order) or offset >= self._lengths[self._order[position]]):
            raise UserError(f"the position in the data is damaged: {dict(state)}")
        self._consumed = offset + (int(self._ends[position - 1]) if position else 0)

    def _begin(self, epoch: int) -> None:
        # The order of raw Philox output: numpy promises those numbers for ever, its permutations it does not.
        keys = np.random.Philox(key=[self.seed & (1 << 64) - 1, epoch]).random_raw(len(self._lengths))
        self._order = np.argsort(keys, kind="stable")
        self._ends = np.cumsum(self._lengths[self._order])
        self._epoch = epoch
        self._consumed = 0


def heldout_batches(part: Part, tokens_per_batch: int, sequence_length: int, *, max_tokens: int | None = None) -> Iterator[Batch]:
    """Every prediction of `part` once, in the order of the file (the first `max_tokens`, if given); the last batch is smaller."""
    starts, lengths = _units(part, sequence_length)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    total = total if max_tokens is None else min(total, max_tokens)
    for begin in range(0, total, tokens_per_batch):
        until = min(begin + tokens_per_batch, total)
        first, last = np.searchsorted(ends, [begin, until - 1], side="right")
        unit_starts, unit_lengths = starts[first : last + 1].copy(), lengths[first : last + 1].copy()
        unit_lengths[-1] -= ends[last] - until
        skipped = begin - (ends[first] - lengths[first])
        unit_starts[0] += skipped
        unit_lengths[0] -= skipped
        yield _batch(part, unit_starts, unit_lengths, 0)


def _units(part: Part, sequence_length: int) -> tuple[Ints, Ints]:
    """(index of the first token, predictions) of each unit."""
    predictions = part.ends - part.starts - 1
    counts = -(-predictions // sequence_length)
    ranges = np.repeat(np.arange(len(counts)), counts)
    within = (np.arange(len(ranges)) - np.repeat(np.cumsum(counts) - counts, counts)) * sequence_length
    return part.starts[ranges] + within, np.minimum(predictions[ranges] - within, sequence_length)


def _batch(part: Part, starts: Ints, lengths: Ints, epoch: int) -> Batch:
    ends = np.cumsum(lengths)
    index = np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
    tokens, targets = part.file.tokens[index].astype(np.int64), part.file.tokens[index + 1].astype(np.int64)
    if max(tokens.max(), targets.max()) >= part.file.vocab_size:
        raise UserError(f"{part.file.path} is damaged: it holds token ids outside its vocabulary; write it anew")
    return Batch(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        segments=Segments(tuple(lengths.tolist())),
        positions=tuple(starts.tolist()),
        documents=tuple((np.searchsorted(part.file.offsets, starts, side="right") - 1).tolist()),
        text_bytes=int(part.file.text_lengths[targets].sum()),
        epoch=epoch,
    )
