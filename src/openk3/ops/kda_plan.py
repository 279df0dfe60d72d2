"""How ragged sequences are cut into chunks for KDA's chunked form.

A chunk starts where its sequence starts, or where the sequence's previous chunk ended, so no chunk holds tokens of two sequences.
The last chunk of a sequence may be short: its free slots are filled with k = v = q = 0, g = 0 and beta = 0, which leave the state alone.

Letters: T tokens, H heads, N sequences, C slots of a chunk, n chunks of a group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import neg

import torch
from torch import Tensor

from openk3.ops.segments import Segments

CHUNK = 64
TILE = 16
# Elements in one array of a group, `[n, H, C, K]`: enough for efficient batched products, few enough that the group stays in the cache.
GROUP_ELEMENTS = 32 * 64 * 128
# Head-chunks that one step of the recurrence should have at least, if there are that many.
STEP_MATRICES = 8


@dataclass(frozen=True)
class Step:
    """Chunk number `index` of the first `count` sequences of a band: chunks `start` to `start + count` of their group.

    The first `going_on` of them have a further chunk; their states after this one are kept from position `kept` of the group's states.
    """

    index: int
    start: int
    count: int
    going_on: int
    kept: int

    def head_chunks(self, heads: int) -> slice:
        """Its chunks, with each head counted on its own."""
        return slice(self.start * heads, (self.start + self.count) * heads)


@dataclass(frozen=True)
class Group:
    """n chunks that are prepared together: some consecutive steps of a band. `number` counts groups over all bands.

    `first` is the flat index of the first token when the n·C slots are consecutive tokens; else `slots` `[n·C]` holds each slot's token.
    `used` are the slots that hold a token and `free` those that do not, when there are such; `last` `[n]` is each chunk's last used slot.
    """

    number: int
    chunks: int
    width: int
    steps: tuple[Step, ...]
    first: int | None
    slots: Tensor
    used: Tensor
    free: Tensor | None
    last: Tensor

    @property
    def states(self) -> int:
        """How many states are kept of the group."""
        return self.steps[-1].kept + self.steps[-1].going_on

    def pack(self, x: Tensor) -> Tensor:
        """`[n, H, C, …]` without what free slots hold; `x` itself when there are none."""
        return x if self.free is None else x.transpose(1, 2).flatten(0, 1).index_select(0, self.used)

    def unpack(self, x: Tensor) -> Tensor:
        """The reverse of `pack`; free slots hold 0."""
        if self.free is None:
            return x
        rows = x.new_zeros((self.chunks * self.width, *x.shape[1:])).index_copy_(0, self.used, x)
        return rows.unflatten(0, (self.chunks, self.width)).transpose(1, 2)

    def gather(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """`[T, H, …]` to `[n, H, C, …]`; free slots hold 0. A view of `x` where that can be."""
        if self.first is not None:
            rows = x[self.first : self.first + self.chunks * self.width]
        else:
            rows = x.index_select(0, self.slots)
            if self.free is not None:
                rows.index_fill_(0, self.free, 0)
        return rows.to(dtype).unflatten(0, (self.chunks, self.width)).transpose(1, 2)

    @contextmanager
    def writing(self, out: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
        """Where to write the group's tokens of `out` `[T, H, …]`: `[n, H, C, …]` of the given dtype, a view of `out` where that can be."""
        if self.first is not None:
            span = out[self.first : self.first + self.chunks * self.width].unflatten(0, (self.chunks, self.width)).transpose(1, 2)
            if out.dtype == dtype:
                yield span
                return
        window = out.new_empty((self.chunks, self.width, *out.shape[1:]), dtype=dtype)
        yield window.transpose(1, 2)
        if self.first is not None:
            span.copy_(window.transpose(1, 2))
        else:
            rows = window.flatten(0, 1).index_select(0, self.used)
            out.index_copy_(0, self.slots.index_select(0, self.used), rows.to(out.dtype))


@dataclass(frozen=True)
class Band:
    """Sequences that advance together, chunk by chunk; the longest come first, so those still running are always the first ones.

    `sequences` are their numbers. `groups` come in order of time.
    """

    sequences: tuple[int, ...]
    groups: tuple[Group, ...]


def chunk_width(length: int) -> int:
    """C for a sequence of the given length: short sequences need not fill 64 slots."""
    return TILE if length <= TILE else 2 * TILE if length <= 2 * TILE else CHUNK


def make_plan(segments: Segments, heads: int, head_width: int, device: torch.device) -> tuple[Band, ...]:
    """Cut the sequences into bands of groups of chunks; sequences without a token are in none. `head_width` is the greater of K and V.

    The chunk width of a sequence depends on its own length alone.
    """
    lengths = segments.lengths
    order = sorted((n for n in range(segments.count) if lengths[n]), key=lambda n: (-chunk_width(lengths[n]), -lengths[n], n))
    bands: list[Band] = []
    groups = position = 0
    while position < len(order):
        width = chunk_width(lengths[order[position]])
        limit = GROUP_ELEMENTS // (width * max(head_width, width))
        members: list[int] = []
        chunks = 0
        while position < len(order) and chunk_width(lengths[order[position]]) == width:
            more = -(-lengths[order[position]] // width)
            if members and (chunks + more) * heads > limit and (len(members) + 1) * heads > STEP_MATRICES:
                break
            members.append(order[position])
            chunks += more
            position += 1
        bands.append(Band(tuple(members), tuple(_groups(segments, members, width, heads, limit, groups, device))))
        groups += len(bands[-1].groups)
    return tuple(bands)


def _groups(
    segments: Segments, members: Sequence[int], width: int, heads: int, limit: int, number: int, device: torch.device
) -> Iterator[Group]:
    chunks = [-(-segments.lengths[n] // width) for n in members]
    running = [bisect_right(chunks, -index - 1, key=neg) for index in range(chunks[0])] + [0]
    steps: list[Step] = []
    starts: list[int] = []
    lengths: list[int] = []
    kept = 0
    for index in range(chunks[0]):
        count, going_on = running[index], running[index + 1]
        if steps and (len(starts) + count) * heads > limit:
            yield _group(number, steps, starts, lengths, width, device)
            number += 1
            steps, starts, lengths, kept = [], [], [], 0
        steps.append(Step(index, len(starts), count, going_on, kept))
        kept += going_on
        for n in members[:count]:
            starts.append(segments.starts[n] + index * width)
            lengths.append(min(width, segments.lengths[n] - index * width))
    yield _group(number, steps, starts, lengths, width, device)


def _group(number: int, steps: list[Step], starts: list[int], lengths: list[int], width: int, device: torch.device) -> Group:
    chunks = len(starts)
    last = torch.tensor([length - 1 for length in lengths], device=device)
    if min(lengths) == width and starts == list(range(starts[0], starts[0] + chunks * width, width)):
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        return Group(number, chunks, width, tuple(steps), starts[0], nothing, nothing, None, last)
    offsets = torch.arange(width)
    held = (offsets < torch.tensor(lengths)[:, None]).flatten()
    slots = (torch.tensor(starts)[:, None] + offsets).flatten().masked_fill(~held, 0).to(device)
    free = None if min(lengths) == width else (~held).nonzero()[:, 0].to(device)
    return Group(number, chunks, width, tuple(steps), None, slots, held.nonzero()[:, 0].to(device), free, last)
