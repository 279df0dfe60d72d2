"""What sequences remember between calls (rule 2 of the house): KDA's state and convolution tails, MLA's latents.

Letters: N sequences, H heads, K key width, V value width, P = H·K, W convolution taps, R latent width, r unrotated shared key width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openk3.config import ModelConfig
from openk3.model.precision import accumulation_dtype
from openk3.ops.segments import Segments

_FIRST_CAPACITY = 64
_GROWTH = 1.5


@dataclass
class RecurrentMemory:
    """One KDA layer's memory of N sequences, of a size that no context changes."""

    recurrent: Tensor
    """`[N, H, K, V]`, fp32 (float64 in a float64 state)."""
    tails: tuple[Tensor, Tensor, Tensor]
    """The last W - 1 raw projections for q, k and v, each `[N, P, W - 1]`, oldest first."""

    def advance(self, recurrent: Tensor, tails: tuple[Tensor, Tensor, Tensor]) -> None:
        """Replace the memory by what a call left. Gradients flow through to the next call unless they are switched off."""
        self.recurrent = recurrent
        self.tails = tails

    @property
    def nbytes(self) -> int:
        """Bytes of the state and the tails."""
        return self.recurrent.nbytes + sum(tail.nbytes for tail in self.tails)

    def select(self, indices: Tensor) -> RecurrentMemory:
        """The memory of some sequences, copied."""
        q, k, v = (tail[indices] for tail in self.tails)
        return RecurrentMemory(self.recurrent[indices], (q, k, v))

    def detach(self) -> RecurrentMemory:
        """The same memory, cut from the graph that made it."""
        q, k, v = (tail.detach() for tail in self.tails)
        return RecurrentMemory(self.recurrent.detach(), (q, k, v))


@dataclass
class LatentMemory:
    """One MLA layer's memory: `R + r` numbers for each token of each sequence."""

    buffers: list[Tensor]
    """For each sequence `[capacity, R + r]`; only its first `lengths[n]` rows are meaningful."""
    lengths: list[int]

    def append(self, latents_TR: Tensor, segments: Segments) -> list[Tensor]:
        """Add each sequence's new rows; returns for each sequence all its rows `[length, R + r]` (views where no gradient is kept)."""
        rows = []
        for n, (new, length) in enumerate(zip(latents_TR.split(segments.lengths), segments.lengths, strict=True)):
            held, total = self.buffers[n], self.lengths[n] + length
            if new.requires_grad or held.requires_grad:
                self.buffers[n] = torch.cat([held[: self.lengths[n]], new])
            elif length:
                self.reserve(n, total)
                self.buffers[n][self.lengths[n] : total] = new
            self.lengths[n] = total
            rows.append(self.buffers[n][:total])
        return rows

    def reserve(self, sequence: int, tokens: int) -> None:
        """Make room for `tokens` tokens of one sequence. Grows geometrically, so that appending stays cheap."""
        held = self.buffers[sequence]
        if tokens <= held.shape[0]:
            return
        grown = held.new_empty(max(tokens, _FIRST_CAPACITY, int(held.shape[0] * _GROWTH)), held.shape[1])
        grown[: self.lengths[sequence]] = held[: self.lengths[sequence]]
        self.buffers[sequence] = grown

    @property
    def nbytes(self) -> int:
        """Bytes of the tokens held, without the room reserved for more."""
        return sum(length * buffer.shape[1] * buffer.element_size() for length, buffer in zip(self.lengths, self.buffers, strict=True))

    @property
    def reserved_nbytes(self) -> int:
        """Bytes allocated, with the room reserved for more."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def select(self, indices: Sequence[int], *, copy: bool) -> LatentMemory:
        """The memory of some sequences."""
        kept = [self.buffers[n][: self.lengths[n]].clone() if copy else self.buffers[n] for n in indices]
        return LatentMemory(kept, [self.lengths[n] for n in indices])

    def detach(self) -> LatentMemory:
        """The same memory, cut from the graph that made it."""
        return LatentMemory([buffer.detach() for buffer in self.buffers], list(self.lengths))


LayerMemory = RecurrentMemory | LatentMemory


class DecoderState:
    """Everything that N sequences remember. A forward call takes a state and leaves it advanced by each sequence's new tokens."""

    def __init__(self, layers: list[LayerMemory], lengths: list[int], dtype: torch.dtype) -> None:
        self.layers = layers
        self.lengths = lengths
        """How many tokens each sequence has seen."""
        self.dtype = dtype

    @staticmethod
    def empty(
        config: ModelConfig, *, sequences: int = 1, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> DecoderState:
        """The state of `sequences` sequences that have seen nothing.

        `dtype` is that of the latents and the convolution tails; KDA's state is fp32, or float64 when `dtype` is float64.
        Raises ValueError for a negative count or a dtype that is not floating point.
        """
        if sequences < 0:
            raise ValueError(f"a state holds 0 or more sequences, not {sequences}")
        if not dtype.is_floating_point:
            raise ValueError(f"a state is kept in a floating-point dtype, not {dtype}")
        heads, width = config.kda_num_heads, config.kda_head_dim
        layers: list[LayerMemory] = []
        for layer in range(config.num_layers):
            if config.is_mla(layer):
                latent = config.kv_lora_rank + config.qk_rope_head_dim
                buffers = [torch.empty(0, latent, dtype=dtype, device=device) for _ in range(sequences)]
                layers.append(LatentMemory(buffers, [0] * sequences))
                continue
            recurrent = torch.zeros(sequences, heads, width, width, dtype=accumulation_dtype(dtype), device=device)
            tail_shape = (sequences, heads * width, config.kda_conv_size - 1)
            q, k, v = (torch.zeros(tail_shape, dtype=dtype, device=device) for _ in range(3))
            layers.append(RecurrentMemory(recurrent, (q, k, v)))
        return DecoderState(layers, [0] * sequences, dtype)

    def fits(self, config: ModelConfig) -> bool:
        """Whether a model of `config` can go on from this state: the same kinds of layer with the same widths."""
        if len(self.layers) != config.num_layers:
            return False
        heads, width, latent = config.kda_num_heads, config.kda_head_dim, config.kv_lora_rank + config.qk_rope_head_dim
        for index, layer in enumerate(self.layers):
            if isinstance(layer, LatentMemory):
                if not config.is_mla(index) or any(buffer.shape[1] != latent for buffer in layer.buffers):
                    return False
            elif config.is_mla(index) or layer.recurrent.shape[1:] != (heads, width, width):
                return False
        return True

    @property
    def sequences(self) -> int:
        """N, the number of sequences."""
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of what is remembered; room reserved for more latents is not counted (`reserved_nbytes` counts it)."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def reserved_nbytes(self) -> int:
        """Bytes allocated in all."""
        return sum(layer.reserved_nbytes if isinstance(layer, LatentMemory) else layer.nbytes for layer in self.layers)

    def reserve(self, tokens: int) -> None:
        """Make room for every sequence to reach `tokens` tokens without another allocation."""
        for layer in self.layers:
            if isinstance(layer, LatentMemory):
                for sequence in range(self.sequences):
                    layer.reserve(sequence, tokens)

    def advance(self, segments: Segments) -> None:
        """Count each sequence's new tokens. The decoder calls it once a forward pass, after all layers."""
        self.lengths = [held + new for held, new in zip(self.lengths, segments.lengths, strict=True)]

    def select(self, indices: Iterable[int]) -> DecoderState:
        """A state of some of the sequences, in the given order, whose further calls leave this one alone.

        Raises IndexError for a sequence that is not there.
        """
        chosen = list(indices)
        for n in chosen:
            if not 0 <= n < self.sequences:
                raise IndexError(f"the state holds {self.sequences} sequences; there is no sequence {n}")
        layers: list[LayerMemory] = []
        for layer in self.layers:
            if isinstance(layer, LatentMemory):
                layers.append(layer.select(chosen, copy=True))
            else:
                layers.append(layer.select(torch.tensor(chosen, dtype=torch.int64, device=layer.recurrent.device)))
        return DecoderState(layers, [self.lengths[n] for n in chosen], self.dtype)

    def clone(self) -> DecoderState:
        """A copy whose further calls leave this one alone."""
        return self.select(range(self.sequences))

    def detach(self) -> DecoderState:
        """The same memory without the graph that made it: truncated back-propagation through time."""
        return DecoderState([layer.detach() for layer in self.layers], list(self.lengths), self.dtype)
