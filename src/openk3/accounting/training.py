"""Memory of a training step, estimated before anything is allocated.

Weights are fp32 (and so are gradients and the optimizer's state); under bf16 autocast the products' operands and results are bf16. What
the backward pass needs is counted op by op, as openk3's ops save it: each of them makes again what is cheap to make again.

Letters: T tokens, D hidden, H heads, K KDA head width, P = H·K, C chunk, F widths of MLPs, L width that experts work in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from openk3.accounting.flops import CHUNK, Recompute, muon_blocks
from openk3.accounting.memory import latent_width
from openk3.accounting.parameters import parameters
from openk3.config import ModelConfig

Precision = Literal["fp32", "bf16-autocast"]
OptimizerKind = Literal["muon", "adamw"]

_FP32, _BF16 = 4, 2
# Layers that are recomputed together where there are no blocks of attention residuals.
_GROUP = 4
# How many logits the loss makes at a time.
_FEW_LOGITS, _MOST_LOGITS, _ENOUGH_ROWS = 1 << 22, 1 << 24, 512
# Numbers that Muon stages at once; the staged stack, the iterate and two products live together.
_MUON_STAGE = 1 << 20
_MUON_COPIES = 5


@dataclass(frozen=True)
class Saved:
    """Numbers per token that are kept for the backward pass: `stream` in the dtype of the residual stream (fp32), `product` in that of
    products (bf16 under autocast), `wide` in fp32 always; `copies` are bytes that only autocast keeps."""

    stream: float = 0.0
    product: float = 0.0
    wide: float = 0.0
    copies: float = 0.0

    def __add__(self, other: Saved) -> Saved:
        return Saved(self.stream + other.stream, self.product + other.product, self.wide + other.wide, self.copies + other.copies)

    def bytes(self, precision: Precision) -> float:
        """Bytes per token."""
        fixed = _FP32 * (self.stream + self.wide)
        return fixed + (_BF16 * self.product + self.copies if precision == "bf16-autocast" else _FP32 * self.product)


def saved_by_readers(config: ModelConfig, readers: int) -> Saved:
    """The normalised input of a half layer: kept once for all projections that read it, but under autocast narrowed for each anew."""
    return Saved(product=config.hidden_size, copies=_BF16 * config.hidden_size * (readers - 1))


def saved_by_kda(config: ModelConfig, sequence_length: int | None = None) -> Saved:
    """One KDA layer from its normalised input on: the projections before and after the convolutions and the l2 norms, the decay and its
    low-rank logits, the op's own error and the states between a sequence's chunks, its output, the gate, and what `o_proj` reads."""
    heads, head, width = config.kda_num_heads, config.kda_head_dim, config.kda_width
    states = 1 / CHUNK if sequence_length is None else (-(-sequence_length // CHUNK) - 1) / sequence_length
    gate = width + (0 if config.kda_full_rank_gate else head)
    product = 3 * width + 3 * width + 2 * width + (head + width) + width + gate + width
    # g and the error, the states; beta before and after its sigmoid, and the norms of q, k and o.
    return saved_by_readers(config, 6) + Saved(product=product, wide=2 * width + width * head * states + 5 * heads)


def saved_by_mla(config: ModelConfig) -> Saved:
    """One MLA layer in its expanded form from its normalised input on: the latents of query and key before and after their norms, what the
    attention reads and writes, the gate, and what `o_proj` reads."""
    heads, rank, latent = config.num_heads, config.kv_lora_rank, latent_width(config)
    keys, values = heads * config.qk_head_dim, heads * config.v_head_dim
    query = keys + 2 * (config.q_lora_rank or 0)
    up = heads * config.qk_nope_head_dim + values
    gate = values if config.mla_output_gate else 0
    # The latent before its norm, after it as the input of kv_up, and the normed latent beside the shared key.
    readers = 3 if config.mla_output_gate else 2
    return saved_by_readers(config, readers) + Saved(product=query + 2 * latent + rank + up + keys + values + 2 * gate)


def saved_by_mlp(width: int) -> Saved:
    """A gated MLP: both branches, and what the last matrix reads."""
    return Saved(product=3 * width)


def saved_by_moe(config: ModelConfig) -> Saved:
    """One mixture of experts from its normalised input on: what the router read and chose, the latent before and after the experts, and
    what the shared experts keep. The routed experts keep only their input and the choice."""
    latent, readers = config.latent_size, 2 if config.num_shared_experts else 0
    # Scores; ids (64 bits) for the weights and for the experts, weights before and after scaling, and the rows of the grouped order.
    choice = Saved(wide=(config.num_experts or 0) + 9 * config.experts_per_token, copies=_FP32 * config.hidden_size)
    moe = choice + saved_by_readers(config, readers + 1) + saved_by_mlp(config.shared_width)
    return moe if latent is None else moe + Saved(product=latent * (3 if config.latent_norm else 2))


def saved_by_layer(config: ModelConfig, layer: int, sequence_length: int | None = None) -> Saved:
    """One decoder layer. Each half keeps what its norm reads; with attention residuals that is a mix, and the running sum is kept too."""
    halves = Saved(stream=2 * config.hidden_size * (2 if config.attn_res_block_size is not None else 1))
    mixer = saved_by_mla(config) if config.is_mla(layer) else saved_by_kda(config, sequence_length)
    if config.is_moe(layer):
        return halves + mixer + saved_by_moe(config)
    return halves + mixer + saved_by_readers(config, 2) + saved_by_mlp(config.intermediate_size)


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
    # The router's product is made in fp32.
    products = sum(p.count for p in parameters(config) if p.kind in ("matrix", "experts") and p.system != "router")
    layers = [tokens * saved_by_layer(config, layer, sequence_length).bytes(precision) for layer in range(config.num_layers)]
    # The head's gradient is made in the forward and scaled in the backward, so there are two of it for a moment.
    logits = min(tokens * config.vocab_size, max(config.vocab_size, _FEW_LOGITS, min(_ENOUGH_ROWS * config.vocab_size, _MOST_LOGITS)))
    head = _FP32 * (logits + config.vocab_size * config.hidden_size)
    # Muon works when the activations are gone, so only what its stacks take beyond them counts.
    blocks = [rows * columns for p in parameters(config) for _, rows, columns in muon_blocks(config, p)] if optimizer == "muon" else []
    stacks = _MUON_COPIES * _FP32 * max(_MUON_STAGE, *blocks) if blocks else 0
    activations = activation_bytes(config, tokens, sequence_length=sequence_length, recompute=recompute, precision=precision)
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer_bytes(config, optimizer),
        "activations": activations,
        "half weights": _BF16 * products if precision == "bf16-autocast" else 0,
        "workspace": round(max(head, stacks - activations, max(layers) / 2)),
    }
