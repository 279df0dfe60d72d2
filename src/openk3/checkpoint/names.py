"""Which tensor of the release layout is which part of which parameter of the model: the one table that loading and saving share.

Names are canonical: without the prefixes `language_model.` and `model.` (see `canonical`). Letters: E experts, F expert width, L latent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openk3.config import ModelConfig

A_LOG_STORED = 128
"""K3 stores `A_log` padded with zeros to this many entries."""

VISION_PREFIXES = ("vision_tower.", "mm_projector.")

Place = tuple[int | slice, ...]


@dataclass(frozen=True)
class Part:
    """One tensor of the release layout, and the place in the parameter that it fills."""

    name: str
    """Canonical name."""
    shape: tuple[int, ...]
    """As stored by the release."""
    place: Place = ()
    """Index into the parameter; () is the whole of it."""
    aliases: tuple[str, ...] = ()
    """Other names that public writers have used for it."""


@dataclass(frozen=True)
class Entry:
    """One parameter or buffer of the model and the tensors of the release that make it up."""

    ours: str
    parts: tuple[Part, ...]


def canonical(name: str) -> str:
    """The name without the prefixes that differ between writers."""
    name = name.replace("_orig_mod.", "")
    for prefix in ("language_model.", "model."):
        name = name.removeprefix(prefix)
    return name


def is_vision(name: str) -> bool:
    """Whether a canonical name belongs to the vision tower or its projector, which a text model passes by."""
    return name.startswith(VISION_PREFIXES)


def full_name(name: str, config: ModelConfig) -> str:
    """A canonical name as the family's release writes it."""
    root = "language_model." if config.family == "kimi_k3" else ""
    return f"{root}{name}" if name == "lm_head.weight" else f"{root}model.{name}"


def entries(config: ModelConfig) -> Iterator[Entry]:
    """Every parameter of `Decoder(config)` with its tensors, in file order. A tied head has no entry."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    yield _plain("embed.weight", "embed_tokens.weight", vocabulary, hidden)
    for layer in range(config.num_layers):
        yield from _layer(config, layer)
    if config.attn_res_block_size:
        yield from _mix("output_res", "output_attn_res", hidden)
    yield _plain("norm.weight", "norm.weight", hidden)
    if not config.tie_word_embeddings:
        yield _plain("head.weight", "lm_head.weight", vocabulary, hidden)


def _plain(ours: str, name: str, *shape: int, aliases: tuple[str, ...] = ()) -> Entry:
    return Entry(ours, (Part(name, shape, (), aliases),))


def _mix(ours: str, name: str, hidden: int) -> Iterator[Entry]:
    yield _plain(f"{ours}.norm_weight", f"{name}_norm.weight", hidden)
    yield _plain(f"{ours}.query", f"{name}_proj.weight", 1, hidden)


def _layer(config: ModelConfig, layer: int) -> Iterator[Entry]:
    ours, theirs, hidden = f"layers.{layer}", f"layers.{layer}", config.hidden_size
    yield _plain(f"{ours}.attn_norm.weight", f"{theirs}.input_layernorm.weight", hidden)
    if config.attn_res_block_size:
        yield from _mix(f"{ours}.attn_res", f"{theirs}.self_attention_res", hidden)
        yield from _mix(f"{ours}.mlp_res", f"{theirs}.mlp_res", hidden)
    yield from (_mla if config.is_mla(layer) else _kda)(config, f"{ours}.attn", f"{theirs}.self_attn")
    yield _plain(f"{ours}.mlp_norm.weight", f"{theirs}.post_attention_layernorm.weight", hidden)
    if config.is_moe(layer):
        yield from _moe(config, f"{ours}.mlp", f"{theirs}.block_sparse_moe")
    else:
        # transformers 5.24 writes dense layers under the sparse name.
        yield from _mlp(config, f"{ours}.mlp", f"{theirs}.mlp", config.intermediate_size, alias=f"{theirs}.block_sparse_moe")


def _kda(config: ModelConfig, ours: str, theirs: str) -> Iterator[Entry]:
    hidden, heads, width = config.hidden_size, config.kda_num_heads, config.kda_head_dim
    total = heads * width
    for letter in "qkv":
        yield _plain(f"{ours}.{letter}_proj.weight", f"{theirs}.{letter}_proj.weight", total, hidden)
        yield _plain(f"{ours}.{letter}_conv", f"{theirs}.{letter}_conv1d.weight", total, 1, config.kda_conv_size)
    yield _plain(f"{ours}.f_down.weight", f"{theirs}.f_a_proj.weight", width, hidden)
    yield _plain(f"{ours}.f_up.weight", f"{theirs}.f_b_proj.weight", total, width)
    stored = (max(A_LOG_STORED, heads),) if config.family == "kimi_k3" else (1, 1, heads, 1)
    yield Entry(f"{ours}.A_log", (Part(f"{theirs}.A_log", stored),))
    yield _plain(f"{ours}.dt_bias", f"{theirs}.dt_bias", total)
    yield _plain(f"{ours}.beta_proj.weight", f"{theirs}.b_proj.weight", heads, hidden)
    if config.kda_full_rank_gate:
        yield _plain(f"{ours}.g_proj.weight", f"{theirs}.g_proj.weight", total, hidden)
    else:
        yield _plain(f"{ours}.g_down.weight", f"{theirs}.g_a_proj.weight", width, hidden)
        yield _plain(f"{ours}.g_up.weight", f"{theirs}.g_b_proj.weight", total, width)
    yield _plain(f"{ours}.o_norm", f"{theirs}.o_norm.weight", width)
    yield _plain(f"{ours}.o_proj.weight", f"{theirs}.o_proj.weight", hidden, total)


def _mla(config: ModelConfig, ours: str, theirs: str) -> Iterator[Entry]:
    hidden, heads, rank = config.hidden_size, config.num_heads, config.kv_lora_rank
    query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    values = heads * config.v_head_dim
    if config.q_lora_rank:
        yield _plain(f"{ours}.q_down.weight", f"{theirs}.q_a_proj.weight", config.q_lora_rank, hidden)
        yield _plain(f"{ours}.q_norm.weight", f"{theirs}.q_a_layernorm.weight", config.q_lora_rank)
        yield _plain(f"{ours}.q_up.weight", f"{theirs}.q_b_proj.weight", query, config.q_lora_rank)
    else:
        yield _plain(f"{ours}.q_proj.weight", f"{theirs}.q_proj.weight", query, hidden)
    yield _plain(f"{ours}.kv_down.weight", f"{theirs}.kv_a_proj_with_mqa.weight", rank + config.qk_rope_head_dim, hidden)
    yield _plain(f"{ours}.kv_norm.weight", f"{theirs}.kv_a_layernorm.weight", rank)
    yield _plain(f"{ours}.kv_up.weight", f"{theirs}.kv_b_proj.weight", heads * config.qk_nope_head_dim + values, rank)
    if config.mla_output_gate:
        yield _plain(f"{ours}.g_proj.weight", f"{theirs}.g_proj.weight", values, hidden)
    yield _plain(f"{ours}.o_proj.weight", f"{theirs}.o_proj.weight", hidden, values)


def _mlp(config: ModelConfig, ours: str, theirs: str, width: int, alias: str | None = None) -> Iterator[Entry]:
    hidden = config.hidden_size
    for matrix, shape in (("gate_proj", (width, hidden)), ("up_proj", (width, hidden)), ("down_proj", (hidden, width))):
        aliases = () if alias is None else (f"{alias}.{matrix}.weight",)
        yield _plain(f"{ours}.{matrix}.weight", f"{theirs}.{matrix}.weight", *shape, aliases=aliases)


def _moe(config: ModelConfig, ours: str, theirs: str) -> Iterator[Entry]:
    assert config.num_experts is not None
    hidden, count, width = config.hidden_size, config.num_experts, config.moe_intermediate_size
    latent = config.latent_size
    yield _plain(f"{ours}.router.weight", f"{theirs}.gate.weight", count, hidden)
    yield _plain(f"{ours}.router.bias", f"{theirs}.gate.e_score_correction_bias", count)
    if latent:
        yield _plain(f"{ours}.latent_down.weight", f"{theirs}.routed_expert_down_proj.weight", latent, hidden)
        if config.latent_norm:
            yield _plain(f"{ours}.latent_norm.weight", f"{theirs}.routed_expert_norm.weight", latent)
        yield _plain(f"{ours}.latent_up.weight", f"{theirs}.routed_expert_up_proj.weight", hidden, latent)
    if config.num_shared_experts:
        yield from _mlp(config, f"{ours}.shared", f"{theirs}.shared_experts", width * config.num_shared_experts)
    width_in = latent or hidden
    gate_up: list[Part] = []
    down: list[Part] = []
    for expert in range(count):
        root = f"{theirs}.experts.{expert}"
        gate_up.append(Part(f"{root}.w1.weight", (width, width_in), (expert, slice(0, width))))
        gate_up.append(Part(f"{root}.w3.weight", (width, width_in), (expert, slice(width, 2 * width))))
        down.append(Part(f"{root}.w2.weight", (width_in, width), (expert,)))
    yield Entry(f"{ours}.experts.w13", tuple(gate_up))
    yield Entry(f"{ours}.experts.w2", tuple(down))
