"""Floating-point operations, a multiplication and an addition being two.

Counted are the matrix products, attention over the context, KDA's recurrence, the short convolutions and the mixing over depth. Norms,
activations, gates and softmaxes are element-wise work and are not counted.

Letters: T tokens, D hidden, H heads, K key width, V value width, C chunk, S residual sources, R latent width, r shared key width.
"""

from __future__ import annotations

from typing import Literal

from openk3.accounting.memory import latent_width
from openk3.accounting.parameters import SYSTEMS, Parameter, parameters
from openk3.config import ModelConfig

Recompute = Literal["none", "layer", "block"]

CHUNK = 64
"""Tokens in a chunk of KDA's chunked form."""


def kda_chunk_flops(heads: int, key: int, value: int, chunk: int = CHUNK) -> int:
    """FLOPs per token of KDA's chunked form (arXiv 2510.26692 §3): 6·C·K + 4·C·V + 6·K·V a head.

    Inside a chunk: the two C×C products of q and k with k, and those that apply the inverse to keys and values and the scores to values.
    Across chunks: the state read by keys and by queries, and written. The small triangular inverse is left out.
    """
    return heads * (6 * chunk * key + 4 * chunk * value + 6 * key * value)


def kda_step_flops(heads: int, key: int, value: int) -> int:
    """FLOPs per token of KDA's recurrence: decay (K·V), and read by the key, write, read by the query (2·K·V each)."""
    return heads * 7 * key * value


def attention_pairs(new: int, past: int = 0) -> int:
    """(query, key) pairs of `new` tokens that follow `past` ones, causally."""
    return new * past + new * (new + 1) // 2


def mla_expanded_flops(config: ModelConfig, new: int, past: int = 0) -> int:
    """One layer's attention in the expanded form: keys and values of the whole context made from latents, then causal attention.

    For `past` = 0 the expansion is the projection `kv_up` of the new tokens.
    """
    heads, rank = config.num_heads, config.kv_lora_rank
    expand = 2 * (new + past) * rank * heads * (config.qk_nope_head_dim + config.v_head_dim)
    return expand + 2 * attention_pairs(new, past) * heads * (config.qk_head_dim + config.v_head_dim)


def mla_absorbed_flops(config: ModelConfig, new: int, past: int = 0) -> int:
    """One layer's attention in the absorbed form: queries into the latent space, attention over latents that all heads share, and back."""
    heads, rank = config.num_heads, config.kv_lora_rank
    absorb = 2 * new * heads * rank * (config.qk_nope_head_dim + config.v_head_dim)
    return absorb + 2 * attention_pairs(new, past) * heads * (latent_width(config) + rank)


def mixing_sources(config: ModelConfig) -> int:
    """Residual sources read per token, summed over all readers: each layer's attention and MLP, and the output. 0 without AttnRes.

    A reader sees every completed block (the first is the embedding) and the running sum. Layer 0's attention reads the embedding alone.
    """
    size = config.attn_res_block_size
    if size is None:
        return 0
    blocks_after = [layer // size + 1 for layer in range(config.num_layers)]
    attention = sum(layer // size + (0 if layer % size == 0 else 1) + 1 for layer in range(1, config.num_layers))
    return attention + sum(blocks + 1 for blocks in blocks_after) + blocks_after[-1] + 1


def projection_flops(config: ModelConfig) -> dict[str, int]:
    """FLOPs per token of all products with weights by system, but for the head and `kv_up`: of experts, those that the token goes to.

    MLA's `kv_up` is part of its attention, whose two forms use it differently; the head's rows are counted where logits are made.
    """
    flops = dict.fromkeys(SYSTEMS, 0)
    for parameter in parameters(config):
        if parameter.kind == "experts":
            flops[parameter.system] += 2 * parameter.count // parameter.shape[0] * config.experts_per_token
        elif parameter.kind == "matrix" and not parameter.name.endswith(".kv_up.weight"):
            flops[parameter.system] += 2 * parameter.count
    flops["kda"] += len(config.kda_layers) * 3 * 2 * config.kda_width * config.kda_conv_size
    # Each source of a mix: the sum of squares, the score, the weighted sum.
    flops["attn_res"] += mixing_sources(config) * 6 * config.hidden_size
    return flops


def prefill_flops(config: ModelConfig, tokens: int, *, past: int = 0, logits: int = 1, chunk: int = CHUNK) -> dict[str, int]:
    """FLOPs by system of taking in `tokens` tokens of one sequence that already holds `past`, and making `logits` rows of logits.

    MLA in the cheaper of its two forms.
    """
    flops = {system: tokens * per_token for system, per_token in projection_flops(config).items()}
    heads, width = config.kda_num_heads, config.kda_head_dim
    flops["kda"] += tokens * len(config.kda_layers) * kda_chunk_flops(heads, width, width, chunk)
    flops["mla"] += len(config.mla_layers) * min(mla_expanded_flops(config, tokens, past), mla_absorbed_flops(config, tokens, past))
    flops["head"] = 2 * logits * config.hidden_size * config.vocab_size
    return flops


def decode_flops(config: ModelConfig, depth: int) -> dict[str, int]:
    """FLOPs by system of the token that makes a sequence `depth` tokens long: KDA's recurrence, absorbed MLA, one row of logits."""
    flops = projection_flops(config)
    heads, width = config.kda_num_heads, config.kda_head_dim
    flops["kda"] += len(config.kda_layers) * kda_step_flops(heads, width, width)
    flops["mla"] += len(config.mla_layers) * mla_absorbed_flops(config, 1, depth - 1)
    flops["head"] = 2 * config.hidden_size * config.vocab_size
    return flops


def training_flops(
    config: ModelConfig, tokens: int, *, sequence_length: int | None = None, recompute: Recompute = "none", chunk: int = CHUNK
) -> int:
    """FLOPs of a training step's forward and backward over `tokens` tokens in sequences of `sequence_length` (None: one sequence).

    Three times the forward: each product has two in its backward. `recompute` "layer" or "block" adds the layers' forward once more.
    Logits of every token; MLA expanded. What single ops compute again inside their backward is not counted: it is their choice, not
    the model's need.
    """
    length = tokens if sequence_length is None else min(sequence_length, tokens)
    whole, rest = divmod(tokens, length) if length else (0, 0)
    forward = sum(projection_flops(config).values()) * tokens
    heads, width = config.kda_num_heads, config.kda_head_dim
    forward += tokens * len(config.kda_layers) * kda_chunk_flops(heads, width, width, chunk)
    forward += len(config.mla_layers) * (whole * mla_expanded_flops(config, length) + mla_expanded_flops(config, rest))
    head = 2 * tokens * config.hidden_size * config.vocab_size
    return (3 if recompute == "none" else 4) * forward + 3 * head


def newton_schulz_flops(rows: int, columns: int, steps: int = 5) -> int:
    """FLOPs of orthogonalising one n×m matrix (n the smaller side) by a quintic iteration: the cheaper of two forms.

    Directly, each step forms X·Xᵀ, squares it and multiplies X: 4·n²·m + 2·n³. Or on the n×n Gram matrix alone, with X only at both ends.
    """
    n, m = min(rows, columns), max(rows, columns)
    return min(steps * (4 * n * n * m + 2 * n**3), 4 * n * n * m + 2 * n**3 * (4 * steps - 3))


def muon_blocks(config: ModelConfig, parameter: Parameter) -> list[tuple[int, int, int]]:
    """The blocks (count, rows, columns) that Per-Head Muon orthogonalises one by one (Kimi K3 report §2.5): queries, keys and values by
    head, experts one by one with gate and up apart, anything else whole."""
    if not parameter.muon:
        return []
    rows, columns = parameter.shape[-2:]
    role = parameter.name.rsplit(".", 2)[-2]
    if parameter.kind == "experts":
        halves = 2 if parameter.name.endswith(".w13") else 1
        return [(halves * parameter.shape[0], rows // halves, columns)]
    if parameter.system == "kda" and role in ("q_proj", "k_proj", "v_proj"):
        return [(config.kda_num_heads, config.kda_head_dim, columns)]
    if parameter.system == "mla" and role in ("q_proj", "q_up"):
        return [(config.num_heads, config.qk_head_dim, columns)]
    if parameter.system == "mla" and role == "kv_up":
        return [(config.num_heads, width, columns) for width in (config.qk_nope_head_dim, config.v_head_dim) if width]
    return [(1, rows, columns)]


def muon_flops(config: ModelConfig, steps: int = 5) -> int:
    """FLOPs of Per-Head Muon's orthogonalisation in one optimizer step."""
    blocks = (block for parameter in parameters(config) for block in muon_blocks(config, parameter))
    return sum(count * newton_schulz_flops(rows, columns, steps) for count, rows, columns in blocks)
