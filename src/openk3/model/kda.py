"""Kimi Delta Attention: fixed-size, lossy, managed recurrent memory (arXiv 2510.26692; Kimi K3 report §2.1.1).

Letters: T tokens, D hidden, H heads, K key and value width, P = H·K, W convolution taps, N sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from openk3.config import ModelConfig
from openk3.model.precision import IslandModule, Projection, island
from openk3.model.trace import Trace
from openk3.ops.gates import gated_rms_norm, kda_gate, l2norm
from openk3.ops.kda import kda
from openk3.ops.segments import Segments
from openk3.ops.short_conv import short_conv

if TYPE_CHECKING:
    from openk3.model.state import RecurrentMemory


class KDA(IslandModule):
    """One KDA layer. The output gate is full rank in K3 (`g_proj`) and low rank in Kimi Linear (`g_down`, `g_up`)."""

    islands = ("q_conv", "k_conv", "v_conv", "A_log", "dt_bias", "o_norm")

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.head_dim = config.kda_num_heads, config.kda_head_dim
        self.lower_bound = config.kda_gate_lower_bound
        self.eps = config.rms_norm_eps
        width, hidden, taps = self.heads * self.head_dim, config.hidden_size, config.kda_conv_size
        self.q_proj = Projection(hidden, width)
        self.k_proj = Projection(hidden, width)
        self.v_proj = Projection(hidden, width)
        self.q_conv = island(width, 1, taps)
        self.k_conv = island(width, 1, taps)
        self.v_conv = island(width, 1, taps)
        self.f_down = Projection(hidden, self.head_dim)
        self.f_up = Projection(self.head_dim, width)
        self.A_log = island(self.heads)
        self.dt_bias = island(width)
        self.beta_proj = Projection(hidden, self.heads)
        full_rank = config.kda_full_rank_gate
        self.g_proj = Projection(hidden, width) if full_rank else None
        self.g_down = None if full_rank else Projection(hidden, self.head_dim)
        self.g_up = None if full_rank else Projection(self.head_dim, width)
        self.o_norm = island(self.head_dim)
        self.o_proj = Projection(width, hidden)

    def forward(self, x_TD: Tensor, segments: Segments, memory: RecurrentMemory | None = None, trace: Trace | None = None) -> Tensor:
        """`[T, D]` to `[T, D]`; `memory` is read and left advanced by each sequence's tokens."""
        tails = (None, None, None) if memory is None else memory.tails
        q, q_tail = short_conv(self.q_proj(x_TD), self.q_conv, segments, tails[0])
        k, k_tail = short_conv(self.k_proj(x_TD), self.k_conv, segments, tails[1])
        v, v_tail = short_conv(self.v_proj(x_TD), self.v_conv, segments, tails[2])
        q_THK, k_THK, v_THV = (t.view(-1, self.heads, self.head_dim) for t in (q, k, v))
        decay = self.f_up(self.f_down(x_TD)).view_as(q_THK)
        g_THK = kda_gate(decay, self.A_log, self.dt_bias, self.lower_bound)
        beta = self.beta_proj(x_TD)
        beta_TH = torch.sigmoid(beta.to(g_THK.dtype))
        if trace is not None:
            trace.note("decay", f"layer.{self.layer}", lambda: g_THK)
            trace.note("write_strength", f"layer.{self.layer}", lambda: beta_TH)
        initial = None if memory is None else memory.recurrent
        o_THV, final_NHKV = kda(l2norm(q_THK), l2norm(k_THK), v_THV, g_THK, beta_TH, segments, initial, lower_bound=self.lower_bound)
        if memory is not None:
            memory.advance(final_NHKV, (q_tail, k_tail, v_tail))
        gate_THV = self._output_gate(x_TD).view_as(o_THV)
        return self.o_proj(gated_rms_norm(o_THV, self.o_norm, gate_THV, self.eps).flatten(1))

    def _output_gate(self, x_TD: Tensor) -> Tensor:
        if self.g_proj is not None:
            return self.g_proj(x_TD)
        assert self.g_down is not None and self.g_up is not None
        return self.g_up(self.g_down(x_TD))
