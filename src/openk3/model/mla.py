"""Gated MLA without positions: exact lookup over compressed, token-addressable memory (Kimi K3 report §2.1.2).

Letters: T new tokens, S tokens in context, D hidden, H heads, R latent width, r width of the key part that all heads share and
nothing rotates, A = width of a head's own key part, V value width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from openk3.config import ModelConfig
from openk3.model.norm import RMSNorm
from openk3.model.precision import Projection
from openk3.ops.attention import absorbed_attention, causal_attention
from openk3.ops.segments import Segments

if TYPE_CHECKING:
    from openk3.model.state import LatentMemory

LATENT_EPS = 1e-6
"""The release normalises both latents with this epsilon whatever `rms_norm_eps` says."""


class MLA(nn.Module):
    """One MLA layer. Two forms give the same numbers: expanded (keys and values made from the latents) and absorbed (queries
    taken into the latent space). `absorb` None picks the one with fewer operations, sequence by sequence; True or False fixes it."""

    absorb: bool | None = None

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.rank = config.num_heads, config.kv_lora_rank
        self.own, self.shared, self.value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.scale = (self.own + self.shared) ** -0.5
        hidden, query_width = config.hidden_size, self.heads * (self.own + self.shared)
        rank = config.q_lora_rank
        self.q_proj = None if rank else Projection(hidden, query_width)
        self.q_down = Projection(hidden, rank) if rank else None
        self.q_norm = RMSNorm(rank, LATENT_EPS) if rank else None
        self.q_up = Projection(rank, query_width) if rank else None
        self.kv_down = Projection(hidden, self.rank + self.shared)
        self.kv_norm = RMSNorm(self.rank, LATENT_EPS)
        self.kv_up = Projection(self.rank, self.heads * (self.own + self.value))
        self.g_proj = Projection(hidden, self.heads * self.value) if config.mla_output_gate else None
        self.o_proj = Projection(self.heads * self.value, hidden)

    def forward(self, x_TD: Tensor, segments: Segments, memory: LatentMemory | None = None) -> Tensor:
        """`[T, D]` to `[T, D]`; `memory` gains each sequence's new latents."""
        q_THK = self._query(x_TD).view(-1, self.heads, self.own + self.shared)
        down = self.kv_down(x_TD)
        latents_TR = torch.cat([self.kv_norm(down[:, : self.rank]), down[:, self.rank :]], dim=1)
        if memory is None:
            o_THV = self._expanded(q_THK, latents_TR, segments, segments)
        else:
            o_THV = self._over_memory(q_THK, memory.append(latents_TR, segments), segments)
        o_TP = o_THV.flatten(1)
        if self.g_proj is not None:
            o_TP = o_TP * torch.sigmoid(self.g_proj(x_TD))
        return self.o_proj(o_TP)

    def _query(self, x_TD: Tensor) -> Tensor:
        if self.q_proj is not None:
            return self.q_proj(x_TD)
        assert self.q_down is not None and self.q_norm is not None and self.q_up is not None
        return self.q_up(self.q_norm(self.q_down(x_TD)))

    def _over_memory(self, q_THK: Tensor, latents: list[Tensor], segments: Segments) -> Tensor:
        """Attention over all that each sequence remembers, each sequence in the cheaper form."""
        absorbed = [n for n, rows in enumerate(latents) if segments.lengths[n] and self._absorbs(segments.lengths[n], rows.shape[0])]
        expanded = [n for n in range(segments.count) if segments.lengths[n] and n not in set(absorbed)]
        if not expanded:
            return self._absorbed(q_THK, latents, segments)
        if not absorbed:
            return self._expanded(q_THK, torch.cat(latents), segments, Segments.of(rows.shape[0] for rows in latents))
        pieces = list(q_THK.split(segments.lengths))
        for group, form in ((absorbed, self._absorbed_group), (expanded, self._expanded_group)):
            part = Segments.of(segments.lengths[n] for n in group)
            out = form(torch.cat([pieces[n] for n in group]), [latents[n] for n in group], part)
            for n, piece in zip(group, out.split(part.lengths), strict=True):
                pieces[n] = piece
        empty = q_THK.new_empty(0, self.heads, self.value)
        return torch.cat([piece if piece.shape[0] else empty for piece in pieces])

    def _absorbs(self, new: int, context: int) -> bool:
        """Whether the absorbed form multiplies less for one sequence: it spares expanding the context and pays in every score."""
        if self.absorb is not None:
            return self.absorb
        if torch.is_grad_enabled() and self.kv_up.weight.requires_grad:
            return False
        expand = context * self.rank * (self.own + self.value) + new * context * (self.own + self.shared + self.value)
        absorb = new * self.rank * (self.own + self.value) + new * context * (2 * self.rank + self.shared)
        return absorb < expand

    def _expanded_group(self, q_THK: Tensor, latents: list[Tensor], segments: Segments) -> Tensor:
        return self._expanded(q_THK, torch.cat(latents), segments, Segments.of(rows.shape[0] for rows in latents))

    def _absorbed_group(self, q_THK: Tensor, latents: list[Tensor], segments: Segments) -> Tensor:
        return self._absorbed(q_THK, latents, segments)

    def _expanded(self, q_THK: Tensor, latents_SR: Tensor, segments: Segments, context: Segments) -> Tensor:
        up_SHW = self.kv_up(latents_SR[:, : self.rank]).view(-1, self.heads, self.own + self.value)
        shared_SHr = latents_SR[:, None, self.rank :].expand(-1, self.heads, -1)
        k_SHK = torch.cat([up_SHW[..., : self.own], shared_SHr], dim=2)
        return causal_attention(q_THK, k_SHK, up_SHW[..., self.own :], segments, context, self.scale)

    def _absorbed(self, q_THK: Tensor, latents: list[Tensor], segments: Segments) -> Tensor:
        up_HWR = self.kv_up.weight.to(q_THK.dtype).view(self.heads, self.own + self.value, self.rank)
        q_HTR = torch.bmm(q_THK[..., : self.own].transpose(0, 1), up_HWR[:, : self.own])
        q_THL = torch.cat([q_HTR.transpose(0, 1), q_THK[..., self.own :]], dim=2)
        o_THR = absorbed_attention(q_THL, latents, segments, self.rank, self.scale)
        return torch.bmm(o_THR.transpose(0, 1), up_HWR[:, self.own :].transpose(1, 2)).transpose(0, 1)
