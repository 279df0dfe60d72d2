"""How a flat batch of tokens divides into sequences (rule 1 of the house: one layout, ragged).

Packed training documents, prefill, chunked prefill, decode and any mix of them are the same thing: `[T, …]` tensors and a `Segments`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """N sequences laid end to end in a flat axis of T tokens.

    Build with `Segments.of([40, 1, 7])`. A length of 0 is a sequence that gets no token in this call.
    `lengths` are Python integers: the host decides shapes, so no device synchronisation hides here.
    """

    lengths: tuple[int, ...]

    @staticmethod
    def of(lengths: Iterable[int] | Tensor) -> Segments:
        """Segments with the given lengths, in order.

        Raises ValueError for a negative or non-integral length.
        """
        values = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
        for position, value in enumerate(values):
            if isinstance(value, bool) or int(value) != value or value < 0:
                raise ValueError(f"segment {position} has length {value!r}: lengths are whole numbers, 0 or more")
        return Segments(tuple(int(value) for value in values))

    @property
    def count(self) -> int:
        """N, the number of sequences."""
        return len(self.lengths)

    @cached_property
    def total(self) -> int:
        """T, the number of tokens."""
        return sum(self.lengths)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The flat index of each sequence's first token; N values."""
        starts, position = [], 0
        for length in self.lengths:
            starts.append(position)
            position += length
        return tuple(starts)

    @cached_property
    def longest(self) -> int:
        """The greatest length (0 when there is no sequence)."""
        return max(self.lengths, default=0)

    @cached_property
    def offsets(self) -> Tensor:
        """Cumulative lengths, int64 `[N + 1]` on the CPU; other libraries call it cu_seqlens."""
        return torch.tensor([*self.starts, self.total], dtype=torch.int64)

    @cached_property
    def ids(self) -> Tensor:
        """For each token the sequence it belongs to, int64 `[T]` on the CPU."""
        return torch.repeat_interleave(torch.arange(self.count), torch.tensor(self.lengths, dtype=torch.int64))

    def check(self, tokens: int) -> None:
        """Raise ValueError unless the lengths add up to `tokens`."""
        if self.total != tokens:
            raise ValueError(f"segments hold {self.total} tokens, but the tensor has {tokens}")
