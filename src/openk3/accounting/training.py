"""Memory of a training step, estimated before anything is allocated.

Weights are fp32 (and so are gradients and the optimizer's state); under bf16 autocast the products' operands and results are bf16. What
the backward pass needs is counted op by op, as openk3's ops save it: each of them makes again what is cheap to make again.

Letters: T tokens, D hidden, H heads, K KDA head width, P = H·K, C chunk, F widths of MLPs, L width that experts work in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from openk3.accounting.flops import CHUNK, Recompute
from openk3.accounting.memory import latent_width
from openk3.accounting.parameters import parameters
from openk3.config import ModelConfig

Precision = Literal["fp32", "bf16-autocast"]
OptimizerKind = Literal["muon", "adamw"]

_FP32 = 4
# Layers that are recomputed together where there are no blocks of attention residuals.
_GROUP = 4
# Rows of logits that the loss makes at a time, as bytes of one block; its gradient takes as many.
_LOGITS_BYTES = 32 * 2**20
# Numbers that Muon stages at once; the staged stack, the iterate and two products live together.
_MUON_STAGE = 1 << 23
_MUON_COPIES = 4


@dataclass(frozen=True)
class Saved:
    """Numbers per token that are kept for the backward pass: `stream` in the dtype of the residual stream (fp32), `product` in that of
    products (bf16 under autocast), `wide` in fp32 always."""

    stream: float = 0.0
    product: float = 0.0
    wide: float = 0.0

    def __add__(self, other: Saved) -> Saved:
        return Saved(self.stream + other.stream, self.product + other.product, self.wide + other.wide)

    def bytes(self, precision: Precision) -> float:
        """Bytes per token."""
        return _FP32 * (self.stream + self.wide) + (2 if precision == "bf16-autocast" else _FP32) * self.product


def saved_by_kda(config: ModelConfig, sequence_length: int | None = None) -> Saved:
    """One KDA layer, from its normalised input on: the projections before and after the convolutions and the l2 norms, the decay and its
    low-rank logits, the op's own error and the states between a sequence's chunks, its output, the gate, and what `o_proj` reads."""
    heads, head, width = config.kda_num_heads, config.kda_head_dim, config.kda_width
    states = 1 / CHUNK if sequence_length is None else (-(-sequence_length // CHUNK) - 1) / sequence_length
    gate = width + (0 if config.kda_full_rank_gate else head)
    product = 3 * width + 3 * width + 2 * width + (head + width) + width + gate + width
    return Saved(product=product, wide=2 * width + width * head * states + 2 * heads)


def saved_by_mla(config: ModelConfig) -> Saved:
    """One MLA layer in its expanded form, from its normalised input on."""
    heads, rank, latent = config.num_heads, config.kv_lora_rank, latent_width(config)
    keys, values = heads * config.qk_head_dim, heads * config.v_head_dim
    query = keys + 2 * (config.q_lora_rank or 0)
    up = heads * config.qk_nope_head_dim + values
    gate = values if config.mla_output_gate else 0
    # The latent before its norm, after it as the input of kv_up, and the normed latent beside the shared key.
    return Saved(product=query + 2 * latent + rank + up + keys + values + 2 * gate)


def saved_by_mlp(width: int) -> Saved:
    """A gated MLP: both branches, and what the last matrix reads."""
    return Saved(product=3 * width)


def saved_by_moe(config: ModelConfig) -> Saved:
    """One mixture of experts: the router's scores, the latent before and after, what the shared experts keep. The experts keep only
    their input and the choice."""
    scores = Saved(stream=config.hidden_size, wide=3 * (config.num_experts or 0) + 6 * config.experts_per_token)
    latent = config.latent_size
    moe = scores if latent is None else scores + Saved(product=latent + (2 if config.latent_norm else 1) * latent)
    return moe + saved_by_mlp(config.shared_width)


def saved_by_layer(config: ModelConfig, layer: int, sequence_length: int | None = None) -> Saved:
    """One decoder layer. Each half keeps its input, before the norm and after; with attention residuals the running sum too."""
    reads = Saved(stream=2 * config.hidden_size * (2 if config.attn_res_block_size is not None else 1), product=2 * config.hidden_size)
    mixer = saved_by_mla(config) if config.is_mla(layer) else saved_by_kda(config, sequence_length)
    mlp = saved_by_moe(config) if config.is_moe(layer) else saved_by_mlp(config.intermediate_size)
    return reads + mixer + mlp


def activation_bytes(
    config: ModelConfig,
    tokens: int,
    *,
    sequence_length: int | None = None,
    recompute: Recompute = "none",
    precision: Precision = "fp32",
) -> int:
    """Bytes kept for the backward pass of one micro-batch of `tokens` tokens, at the moment when most is held.

    With `recompute` "layer" or "block" the running sum at the start of each layer or block is kept, and one at a time is made again.
    """
    stream = tokens * config.hidden_size * _FP32
    layers = [tokens * saved_by_layer(config, layer, sequence_length).bytes(precision) for layer in range(config.num_layers)]
    # The output's mix and norm, and the gradient of what the head reads.
    ends = (3 if config.attn_res_block_size is not None else 2) * stream
    if recompute == "none":
        return round(sum(layers) + ends)
    size = 1 if recompute == "layer" else (config.attn_res_block_size or _GROUP)
    groups = [sum(layers[start : start + size]) for start in range(0, config.num_layers, size)]
    return round(max(groups) + len(groups) * stream + ends)


def optimizer_bytes(config: ModelConfig, kind: OptimizerKind = "muon") -> int:
    """Bytes of the optimizer's state: one momentum for what Muon moves, two moments and a step count for what AdamW moves."""
    total = 0
    for parameter in parameters(config):
        if parameter.kind == "buffer":
            continue
        muon = kind == "muon" and parameter.muon
        total += _FP32 * (parameter.count if muon else 2 * parameter.count + 1)
    return total


def training_bytes(
    config: ModelConfig,
    *,
    tokens: int,
    sequence_length: int | None = None,
    recompute: Recompute = "none",
    precision: Precision = "fp32",
    optimizer: OptimizerKind = "muon",
) -> dict[str, int]:
    """Bytes that a training step over micro-batches of `tokens` tokens takes, by what holds them; the step's peak is at most their sum.

    `weights`, `gradients`, `optimizer`, `activations` (kept for the backward pass), `half weights` (the bf16 copies of autocast) and
    `workspace` (what comes and goes: logits of a block of rows, gradients on their way through one layer, the optimizer's stacks).
    `sequence_length` None is one long sequence; short ones keep fewer of KDA's states between chunks, and nothing else depends on it.
    """
    weights = _FP32 * sum(parameter.count for parameter in parameters(config))
    gradients = _FP32 * sum(parameter.count for parameter in parameters(config) if parameter.kind != "buffer")
    narrow = [parameter.count for parameter in parameters(config) if parameter.kind in ("matrix", "experts")]
    layers = [tokens * saved_by_layer(config, layer, sequence_length).bytes(precision) for layer in range(config.num_layers)]
    logits = 2 * min(_LOGITS_BYTES, tokens * config.vocab_size * _FP32)
    muon = [parameter.count for parameter in parameters(config) if parameter.muon]
    stacks = _MUON_COPIES * _FP32 * min(sum(muon), max(_MUON_STAGE, *muon)) if optimizer == "muon" and muon else 0
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer_bytes(config, optimizer),
        "activations": activation_bytes(config, tokens, sequence_length=sequence_length, recompute=recompute, precision=precision),
        "half weights": 2 * (sum(narrow) + config.vocab_size * config.hidden_size) if precision == "bf16-autocast" else 0,
        "workspace": round(max(logits, stacks, max(layers, default=0))),
    }
