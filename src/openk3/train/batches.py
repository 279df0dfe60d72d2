"""Ragged training batches: pieces of documents end to end, exactly as many tokens as asked for, each prediction once an epoch.

A range of n tokens (`Part`) asks for n - 1 predictions. Ranges are cut into units of at most `sequence_length` predictions; each epoch
takes the units in an order of its own, and a batch takes the next `tokens_per_batch` predictions of that stream. What a batch cuts off
begins the next one, as a piece of its own. The last token of a piece predicts the one that follows it in its document, so that every
position has a target.
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

IGNORED = -100
"""The target of a token whose successor is not to be learned."""


@dataclass(frozen=True, eq=False)
class Batch:
    """T predictions in N pieces; the state is reset where a piece begins."""

    tokens: Tensor
    """int64 `[T]`."""
    targets: Tensor
    """int64 `[T]`, the token that follows each; -100 where it is not to be learned."""
    segments: Segments
    positions: tuple[int, ...]
    """For each piece the index of its first token in the file; N values."""
    documents: tuple[int, ...]
    """For each piece the index of its document in the file; N values."""
    text_bytes: int
    """Bytes of text that the targets stand for: bits per byte = mean loss in nats · T / (ln 2 · text_bytes)."""
    epoch: int
    """The epoch of the first piece."""


class PackedBatches:
    """An endless stream of batches over a part of a token file. All that it remembers is where it stands: three numbers."""

    def __init__(self, part: Part, tokens_per_batch: int, sequence_length: int, *, seed: int = 0) -> None:
        """Raises UserError when the part holds less than one batch."""
        _check(tokens_per_batch, sequence_length)
        if part.predictions < tokens_per_batch:
            raise UserError(
                f"{part.file.path} has {part.predictions:,} tokens to train on, less than one batch of {tokens_per_batch:,}: "
                "give more text, or make the batch smaller"
            )
        self.part = part
        self.tokens_per_batch = tokens_per_batch
        self.sequence_length = sequence_length
        self.seed = seed
        self._units = _Units.of(part, sequence_length)
        self._epoch = 0
        self._consumed = 0
        self._ordered = self._units.shuffled(seed, 0)

    @property
    def progress(self) -> float:
        """How often the part was gone through so far: 1.5 is in the middle of the second epoch."""
        return self._epoch + self._consumed / self.part.predictions

    def next(self) -> Batch:
        """The next `tokens_per_batch` predictions. Batches in which nothing is to be learned are passed over."""
        while True:
            batch = self._next()
            if self.part.file.learned is None or bool((batch.targets >= 0).any()):
                return batch

    def _next(self) -> Batch:
        pieces: list[tuple[Ints, Ints]] = []
        epoch = self._epoch
        missing = self.tokens_per_batch
        while missing:
            if self._consumed == self.part.predictions:
                self._epoch += 1
                self._consumed = 0
                self._ordered = self._units.shuffled(self.seed, self._epoch)
            epoch = epoch if pieces else self._epoch
            until = min(self._consumed + missing, self.part.predictions)
            pieces.append(self._ordered.between(self._consumed, until))
            missing -= until - self._consumed
            self._consumed = until
        starts, lengths = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        return _batch(self.part, starts, lengths, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, and what it must be resumed with (data, seed, sequence length). JSON holds it."""
        position, offset = self._ordered.place(self._consumed)
        return {
            "epoch": self._epoch,
            "position": position,
            "offset": offset,
            "seed": self.seed,
            "sequence_length": self.sequence_length,
            "data": self.part.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where `state` was taken; the batches from here on are those that came there, bit for bit.

        Raises UserError when it was taken with other data, another seed or another sequence length, or is damaged; then nothing changes.
        """
        own = self.state_dict()
        if set(state) != set(own):
            raise UserError(f"the position in the data is damaged: it has {sorted(state)}, not {sorted(own)}")
        for name, what in (("data", "text or held-out share"), ("seed", "seed"), ("sequence_length", "sequence length")):
            if state[name] != own[name]:
                raise UserError(f"the position in the data was taken with another {what}: its {name} is {state[name]}, not {own[name]}")
        epoch, position, offset = place = [state[name] for name in ("epoch", "position", "offset")]
        whole = all(type(value) is int and value >= 0 for value in place) and epoch < 1 << 63
        ordered = self._units.shuffled(self.seed, epoch) if whole else self._ordered
        if not whole or not ordered.holds(position, offset):
            raise UserError(f"the position in the data is damaged: epoch {epoch}, position {position}, offset {offset}")
        self._epoch, self._ordered = epoch, ordered
        self._consumed = ordered.consumed(position, offset)


def heldout_batches(part: Part, tokens_per_batch: int, sequence_length: int, *, max_tokens: int | None = None) -> Iterator[Batch]:
    """Every prediction of `part` once (the first `max_tokens`, if given), always in the same order; the last batch may be smaller.

    The order is mixed, so that the first tokens are a fair sample.
    """
    _check(tokens_per_batch, sequence_length)
    units = _Units.of(part, sequence_length).shuffled(0, 0)
    total = part.predictions if max_tokens is None else min(part.predictions, max_tokens)
    for begin in range(0, total, tokens_per_batch):
        yield _batch(part, *units.between(begin, min(begin + tokens_per_batch, total)), epoch=0)


@dataclass(frozen=True, eq=False)
class _Units:
    """Units in some order, and the stream of predictions that they make."""

    starts: Ints
    """Index in the file of each unit's first token."""
    lengths: Ints
    """Its predictions."""
    ends: Ints
    """Where it ends in the stream."""

    @staticmethod
    def of(part: Part, sequence_length: int) -> _Units:
        predictions = part.ends - part.starts - 1
        counts = -(-predictions // sequence_length)
        ranges = np.repeat(np.arange(len(counts)), counts)
        within = (np.arange(len(ranges)) - np.repeat(np.cumsum(counts) - counts, counts)) * sequence_length
        lengths = np.minimum(predictions[ranges] - within, sequence_length)
        return _Units(part.starts[ranges] + within, lengths, np.cumsum(lengths))

    def shuffled(self, seed: int, epoch: int) -> _Units:
        # Sorted by Philox's raw output: numpy promises those numbers for ever, its permutations it does not.
        key = np.array([seed & (1 << 64) - 1, epoch], np.uint64)
        keys = np.random.Philox(key=key).random_raw(len(self.lengths))
        order = np.argsort(keys, kind="stable")
        lengths = self.lengths[order]
        return _Units(self.starts[order], lengths, np.cumsum(lengths))

    def between(self, begin: int, until: int) -> tuple[Ints, Ints]:
        """(index of the first token, predictions) of the pieces that predictions `begin` to `until` of the stream consist of."""
        first = int(np.searchsorted(self.ends, begin, side="right"))
        last = int(np.searchsorted(self.ends, until, side="left"))
        starts, lengths = self.starts[first : last + 1].copy(), self.lengths[first : last + 1].copy()
        lengths[-1] -= self.ends[last] - until
        skipped = begin - self.consumed(first, 0)
        starts[0] += skipped
        lengths[0] -= skipped
        return starts, lengths

    def place(self, consumed: int) -> tuple[int, int]:
        """(unit, predictions of it) at which `consumed` predictions of the stream are over."""
        position = int(np.searchsorted(self.ends, consumed, side="right"))
        return position, consumed - self.consumed(position, 0)

    def consumed(self, position: int, offset: int) -> int:
        """The inverse of `place`."""
        return (int(self.ends[position - 1]) if position else 0) + offset

    def holds(self, position: int, offset: int) -> bool:
        """Whether `place` can give this."""
        return offset < self.lengths[position] if position < len(self.lengths) else position == len(self.lengths) and offset == 0


def _check(tokens_per_batch: int, sequence_length: int) -> None:
    if tokens_per_batch < 1 or sequence_length < 1:
        raise ValueError(f"tokens_per_batch is {tokens_per_batch}, sequence_length {sequence_length}: both must be 1 or more")


def _batch(part: Part, starts: Ints, lengths: Ints, epoch: int) -> Batch:
    ends = np.cumsum(lengths)
    index = np.arange(ends[-1]) + np.repeat(starts - ends + lengths, lengths)
    tokens, targets = part.file.tokens[index].astype(np.int64), part.file.tokens[index + 1].astype(np.int64)
    if max(tokens.max(), targets.max()) >= part.file.vocab_size:
        raise UserError(f"{part.file.path} is damaged: it holds token ids outside its vocabulary; write it anew")
    text_bytes = part.file.text_lengths[targets]
    if part.file.learned is not None:
        learned = part.file.learned[index + 1] != 0
        targets, text_bytes = np.where(learned, targets, IGNORED), text_bytes[learned]
    return Batch(
        tokens=torch.from_numpy(tokens),
        targets=torch.from_numpy(targets),
        segments=Segments(tuple(lengths.tolist())),
        positions=tuple(starts.tolist()),
        documents=tuple((np.searchsorted(part.file.offsets, starts, side="right") - 1).tolist()),
        text_bytes=int(text_bytes.sum()),
        epoch=epoch,
    )
