"""The assembled model: embedding, layers of KDA or gated MLA with dense or sparse feed-forward, residuals over depth, head.

Letters: T tokens, D hidden, N sequences. Batches are ragged everywhere: `tokens [T]` plus `Segments`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from openk3.config import ModelConfig
from openk3.model.attn_res import AttnResMix
from openk3.model.init import initialise
from openk3.model.kda import KDA
from openk3.model.mla import MLA
from openk3.model.mlp import DenseMLP
from openk3.model.moe import LatentMoE, Router
from openk3.model.norm import RMSNorm
from openk3.model.precision import Projection
from openk3.model.routing_log import RoutingLog
from openk3.model.state import DecoderState, LatentMemory, LayerMemory, RecurrentMemory
from openk3.model.trace import Trace
from openk3.ops.cross_entropy import LossTerms, linear_cross_entropy
from openk3.ops.segments import Segments

Recompute = Literal["none", "layer", "block"]
Residual = tuple[Tensor, list[Tensor]]
"""The running prefix `[T, D]` and the completed blocks, oldest first."""


@dataclass
class DecoderOutput:
    """What a forward pass returns."""

    logits: Tensor
    """`[T, vocabulary]`, or `[N, vocabulary]` with `logits="last"` (rows of sequences without new tokens are zero)."""
    hidden: Tensor
    """`[T, D]`, normalised: what the head reads."""
    hidden_states: tuple[Tensor, ...] | None = None
    """On request: the embedding, then the running residual after each layer, each `[T, D]`. With AttnRes it restarts at each block."""
    blocks: tuple[Tensor, ...] = ()
    """On request: the completed AttnRes blocks, oldest first; the first is the embedding."""


class Layer(nn.Module):
    """One decoder layer: attention, then feed-forward, each reading a mix over depth where AttnRes is on."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.index = index
        self.attn_norm = RMSNorm(hidden, eps)
        self.attn: KDA | MLA = MLA(config, index) if config.is_mla(index) else KDA(config, index)
        self.mlp_norm = RMSNorm(hidden, eps)
        self.mlp: LatentMoE | DenseMLP
        self.mlp = LatentMoE(config, index) if config.is_moe(index) else DenseMLP(config, config.intermediate_size)
        block = config.attn_res_block_size
        self.attn_res = AttnResMix(hidden, eps) if block else None
        self.mlp_res = AttnResMix(hidden, eps) if block else None
        self.opens_block = bool(block) and index % (block or 1) == 0

    def forward(
        self,
        residual: Residual,
        segments: Segments,
        memory: LayerMemory | None = None,
        routing: RoutingLog | None = None,
        trace: Trace | None = None,
    ) -> Residual:
        """Advance the residual by this layer. The blocks that come back are a new list; the tensors in it are shared."""
        prefix_TD, blocks = residual
        h_TD = self._read(self.attn_res if blocks else None, blocks, prefix_TD, "attn", trace)
        # An opened block starts from nothing: what came before is now a source of its own.
        opened = self.opens_block
        blocks = [*blocks, prefix_TD] if opened else blocks
        x_TD = self.attn_norm(h_TD)
        if isinstance(self.attn, KDA):
            assert memory is None or isinstance(memory, RecurrentMemory)
            out_TD = self.attn(x_TD, segments, memory, trace)
        else:
            assert memory is None or isinstance(memory, LatentMemory)
            out_TD = self.attn(x_TD, segments, memory)
        prefix_TD = out_TD.to(prefix_TD.dtype) if opened else prefix_TD + out_TD
        x_TD = self.mlp_norm(self._read(self.mlp_res, blocks, prefix_TD, "mlp", trace))
        out_TD = self.mlp(x_TD, routing, trace) if isinstance(self.mlp, LatentMoE) else self.mlp(x_TD)
        return prefix_TD + out_TD, blocks

    def _read(self, mix: AttnResMix | None, blocks: Sequence[Tensor], prefix_TD: Tensor, reader: str, trace: Trace | None) -> Tensor:
        if mix is None:
            return prefix_TD
        if trace is not None:
            trace.note("mixing", f"layer.{self.index}.{reader}", lambda: mix.weights(blocks, prefix_TD))
        return mix(blocks, prefix_TD)


class Decoder(nn.Module):
    """A K3 (or Kimi Linear) text decoder of any size, built from `config` with starting weights from `generator`.

    On the `meta` device nothing is filled. `config` stays readable as `.config`.
    """

    def __init__(self, config: ModelConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, _weight=torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.output_res = AttnResMix(config.hidden_size, config.rms_norm_eps) if config.attn_res_block_size else None
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = Projection(config.hidden_size, config.vocab_size)
        if config.tie_word_embeddings:
            self.head.weight = self.embed.weight
        if not self.embed.weight.is_meta:
            initialise(self, generator)

    def forward(
        self,
        tokens: Tensor,
        segments: Segments,
        state: DecoderState | None = None,
        *,
        logits: Literal["all", "last"] = "all",
        hidden_states: bool = False,
        routing: RoutingLog | None = None,
        trace: Trace | None = None,
    ) -> DecoderOutput:
        """Logits for `tokens [T]` of the sequences that `segments` marks; `state`, when given, is read and left advanced.

        Raises ValueError when shapes, segments, state and vocabulary do not fit together.
        """
        if logits not in ("all", "last"):
            raise ValueError(f'logits is "all" or "last", not {logits!r}')
        kept: list[Tensor] | None = [] if hidden_states else None
        hidden_TD, blocks = self._body(tokens, segments, state, routing, "none", trace, kept)
        read = hidden_TD if logits == "all" else self._last_rows(hidden_TD, segments)
        return DecoderOutput(
            logits=self.head(read),
            hidden=hidden_TD,
            hidden_states=None if kept is None else tuple(kept),
            blocks=tuple(blocks) if hidden_states else (),
        )

    def loss(
        self,
        tokens: Tensor,
        segments: Segments,
        targets: Tensor,
        token_weights: Tensor | None = None,
        *,
        routing: RoutingLog | None = None,
        recompute: Recompute = "none",
    ) -> LossTerms:
        """Summed cross-entropy (nats) of `targets [T]`, negative ones ignored, weighted by `token_weights [T]`.

        Logits are never all in memory.

        `recompute` keeps less for the backward pass and computes it again: `layer` keeps each layer's input, `block` each AttnRes
        block's (every four layers where AttnRes is off).
        """
        if recompute not in ("none", "layer", "block"):
            raise ValueError(f'recompute is "none", "layer" or "block", not {recompute!r}')
        if recompute != "none" and routing is None:
            # Recomputed layers must pick the experts that the first pass picked.
            routing = RoutingLog()
        hidden_TD, _ = self._body(tokens, segments, None, routing, recompute, None, None)
        return linear_cross_entropy(hidden_TD, self.head.weight.to(hidden_TD.dtype), targets, token_weights)

    def routers(self) -> dict[int, Router]:
        """The routers by layer index."""
        return {layer.index: layer.mlp.router for layer in self._layers() if isinstance(layer.mlp, LatentMoE)}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the trunk."""
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed.weight.device

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def _check(self, tokens: Tensor, segments: Segments, state: DecoderState | None) -> None:
        if not isinstance(tokens, Tensor):
            raise ValueError(f"tokens are a tensor of integers, not {type(tokens).__name__}")
        if tokens.dim() != 1 or tokens.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"tokens are integers of shape [T], not {tokens.dtype} {list(tokens.shape)}")
        segments.check(tokens.shape[0])
        if state is not None and state.sequences != segments.count:
            raise ValueError(f"the state holds {state.sequences} sequences, but segments name {segments.count}")
        if state is not None and not state.fits(self.config):
            raise ValueError("the state was made for another config: its layers or their widths are not this model's")
        if tokens.device.type == "cpu" and tokens.numel():
            low, high = int(tokens.min()), int(tokens.max())
            if low < 0 or high >= self.config.vocab_size:
                raise ValueError(f"token id {low if low < 0 else high} is outside the vocabulary of {self.config.vocab_size}")

    def _body(
        self,
        tokens: Tensor,
        segments: Segments,
        state: DecoderState | None,
        routing: RoutingLog | None,
        recompute: Recompute,
        trace: Trace | None,
        kept: list[Tensor] | None,
    ) -> Residual:
        self._check(tokens, segments, state)
        prefix_TD: Tensor = self.embed(tokens)
        residual: Residual = (prefix_TD, [])
        if kept is not None:
            kept.append(prefix_TD)
        for group in self._groups(recompute):
            if recompute != "none" and torch.is_grad_enabled():
                residual = checkpoint(
                    self._run, group, residual, segments, None, routing, None, None, use_reentrant=False, preserve_rng_state=False
                )
            else:
                residual = self._run(group, residual, segments, state, routing, trace, kept)
        if state is not None:
            state.advance(segments)
        prefix_TD, blocks = residual
        if self.output_res is not None:
            output_res, last_TD = self.output_res, prefix_TD
            if trace is not None:
                trace.note("mixing", "output", lambda: output_res.weights(blocks, last_TD))
            prefix_TD = output_res(blocks, prefix_TD)
        return self.norm(prefix_TD), blocks

    def _run(
        self,
        group: list[Layer],
        residual: Residual,
        segments: Segments,
        state: DecoderState | None,
        routing: RoutingLog | None,
        trace: Trace | None,
        kept: list[Tensor] | None,
    ) -> Residual:
        for layer in group:
            memory = None if state is None else state.layers[layer.index]
            residual = layer(residual, segments, memory, routing, trace)
            if kept is not None:
                kept.append(residual[0])
        return residual

    def _groups(self, recompute: Recompute) -> list[list[Layer]]:
        """The layers in runs that are recomputed together."""
        layers = self._layers()
        if recompute == "none":
            return [layers]
        size = 1 if recompute == "layer" else (self.config.attn_res_block_size or 4)
        return [layers[start : start + size] for start in range(0, len(layers), size)]

    def _last_rows(self, hidden_TD: Tensor, segments: Segments) -> Tensor:
        if all(segments.lengths):
            return hidden_TD[segments.offsets[1:].to(hidden_TD.device) - 1]
        rows = hidden_TD.new_zeros(segments.count, hidden_TD.shape[1])
        filled = [n for n, length in enumerate(segments.lengths) if length]
        rows[filled] = hidden_TD[[segments.starts[n] + segments.lengths[n] - 1 for n in filled]]
        return rows
