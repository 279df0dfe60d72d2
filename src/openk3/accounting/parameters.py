"""Every parameter that a config implies, by system: names, shapes, counts.

The names are those of `openk3.model`'s modules, so that a test can hold this list against a real model. What they are called in a
release's files is the business of `openk3.checkpoint`.

Letters: D hidden, H heads, K KDA head width, P = H·K, W convolution taps, E experts, F expert width, L width that experts work in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from openk3.config import ModelConfig

SYSTEMS = (
    "embedding",
    "kda",
    "mla",
    "dense_mlp",
    "router",
    "routed_experts",
    "shared_experts",
    "latent",
    "attn_res",
    "norms",
    "head",
)

Kind = Literal["matrix", "experts", "embedding", "vector", "buffer"]

A_LOG_STORED = 128
"""Kimi K3's files hold `A_log` padded with zeros to this many entries."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model, or the router's selection bias, which is a buffer.

    `kind`: `matrix` (maps activations to activations), `experts` (a stack of matrices), `embedding` (vocabulary rows: the table and the
    head), `vector` (norm weights, gate constants, convolution taps, depth queries), `buffer`. `island`: at least fp32 in every model.
    """

    name: str
    shape: tuple[int, ...]
    system: str
    kind: Kind
    layer: int | None = None
    island: bool = False

    @property
    def count(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def muon(self) -> bool:
        """Whether Muon moves it: every matrix between features. A row of the router or of `beta_proj` is a readout of its own."""
        return self.kind == "experts" or (self.kind == "matrix" and not self.name.endswith(("router.weight", "beta_proj.weight")))


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Every parameter of `Decoder(config)`, and each router's bias, once. A tied head is the embedding and is not listed again."""
    hidden = config.hidden_size
    yield Parameter("embed.weight", (config.vocab_size, hidden), "embedding", "embedding")
    for layer in range(config.num_layers):
        yield from _layer(config, layer)
    if config.attn_res_block_size is not None:
        yield from _mix("output_res", hidden, None)
    yield Parameter("norm.weight", (hidden,), "norms", "vector")
    if not config.tie_word_embeddings:
        yield Parameter("head.weight", (config.vocab_size, hidden), "head", "embedding")


def _layer(config: ModelConfig, layer: int) -> Iterator[Parameter]:
    root, hidden = f"layers.{layer}", config.hidden_size
    yield Parameter(f"{root}.attn_norm.weight", (hidden,), "norms", "vector", layer)
    yield Parameter(f"{root}.mlp_norm.weight", (hidden,), "norms", "vector", layer)
    if config.attn_res_block_size is not None:
        yield from _mix(f"{root}.attn_res", hidden, layer)
        yield from _mix(f"{root}.mlp_res", hidden, layer)
    yield from (_mla if config.is_mla(layer) else _kda)(config, f"{root}.attn", layer)
    if config.is_moe(layer):
        yield from _moe(config, f"{root}.mlp", layer)
    else:
        yield from _mlp(f"{root}.mlp", hidden, config.intermediate_size, "dense_mlp", layer)


def _mix(root: str, hidden: int, layer: int | None) -> Iterator[Parameter]:
    yield Parameter(f"{root}.norm_weight", (hidden,), "attn_res", "vector", layer)
    yield Parameter(f"{root}.query", (1, hidden), "attn_res", "vector", layer)


def _matrices(root: str, shapes: dict[str, tuple[int, int]], system: str, layer: int) -> Iterator[Parameter]:
    for name, shape in shapes.items():
        yield Parameter(f"{root}.{name}.weight", shape, system, "matrix", layer)


def _kda(config: ModelConfig, root: str, layer: int) -> Iterator[Parameter]:
    hidden, heads, width, total = config.hidden_size, config.kda_num_heads, config.kda_head_dim, config.kda_width
    shapes = {f"{letter}_proj": (total, hidden) for letter in "qkv"}
    shapes |= {"f_down": (width, hidden), "f_up": (total, width), "beta_proj": (heads, hidden)}
    shapes |= {"g_proj": (total, hidden)} if config.kda_full_rank_gate else {"g_down": (width, hidden), "g_up": (total, width)}
    yield from _matrices(root, shapes | {"o_proj": (hidden, total)}, "kda", layer)
    for letter in "qkv":
        yield Parameter(f"{root}.{letter}_conv", (total, 1, config.kda_conv_size), "kda", "vector", layer, island=True)
    for name, size in (("A_log", heads), ("dt_bias", total), ("o_norm", width)):
        yield Parameter(f"{root}.{name}", (size,), "kda", "vector", layer, island=True)


def _mla(config: ModelConfig, root: str, layer: int) -> Iterator[Parameter]:
    hidden, heads, rank = config.hidden_size, config.num_heads, config.kv_lora_rank
    query, values = heads * config.qk_head_dim, heads * config.v_head_dim
    if config.q_lora_rank is None:
        shapes = {"q_proj": (query, hidden)}
    else:
        shapes = {"q_down": (config.q_lora_rank, hidden), "q_up": (query, config.q_lora_rank)}
        yield Parameter(f"{root}.q_norm.weight", (config.q_lora_rank,), "mla", "vector", layer)
    shapes |= {"kv_down": (rank + config.qk_rope_head_dim, hidden), "kv_up": (heads * config.qk_nope_head_dim + values, rank)}
    yield Parameter(f"{root}.kv_norm.weight", (rank,), "mla", "vector", layer)
    if config.mla_output_gate:
        shapes["g_proj"] = (values, hidden)
    yield from _matrices(root, shapes | {"o_proj": (hidden, values)}, "mla", layer)


def _mlp(root: str, hidden: int, width: int, system: str, layer: int) -> Iterator[Parameter]:
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    yield from _matrices(root, shapes, system, layer)


def _moe(config: ModelConfig, root: str, layer: int) -> Iterator[Parameter]:
    hidden, experts, width, inner = config.hidden_size, config.num_experts or 0, config.moe_intermediate_size, config.expert_width
    yield Parameter(f"{root}.router.weight", (experts, hidden), "router", "matrix", layer)
    yield Parameter(f"{root}.router.bias", (experts,), "router", "buffer", layer, island=True)
    if config.latent_size is not None:
        yield from _matrices(root, {"latent_down": (inner, hidden), "latent_up": (hidden, inner)}, "latent", layer)
        if config.latent_norm:
            yield Parameter(f"{root}.latent_norm.weight", (inner,), "latent", "vector", layer)
    yield Parameter(f"{root}.experts.w13", (experts, 2 * width, inner), "routed_experts", "experts", layer)
    yield Parameter(f"{root}.experts.w2", (experts, inner, width), "routed_experts", "experts", layer)
    if config.num_shared_experts:
        yield from _mlp(f"{root}.shared", hidden, config.shared_width, "shared_experts", layer)


def parameter_counts(config: ModelConfig) -> dict[str, int]:
    """Numbers in the model by system, in the order of SYSTEMS; 0 for a system that the config does not have."""
    counts = dict.fromkeys(SYSTEMS, 0)
    for parameter in parameters(config):
        counts[parameter.system] += parameter.count
    return counts


def total_parameters(config: ModelConfig) -> int:
    """Numbers in the text model, the routers' biases included; a tied table counts once."""
    return sum(parameter_counts(config).values())


def stored_parameters(config: ModelConfig) -> int:
    """Numbers in the model's files before packing: Kimi K3 pads `A_log`, so this is a little more than `total_parameters`."""
    padding = max(0, A_LOG_STORED - config.kda_num_heads) if config.family == "kimi_k3" else 0
    return total_parameters(config) + len(config.kda_layers) * padding


def active_counts(config: ModelConfig) -> dict[str, int]:
    """Numbers that take part in computing one token, by system: of the routed experts only those that the token goes to.

    A tied table counts as the head (it is multiplied by), an untied one as the embedding too, though only one row of it is read.
    """
    counts = parameter_counts(config)
    if config.num_experts is not None:
        counts["routed_experts"] = counts["routed_experts"] // config.num_experts * config.experts_per_token
    if config.tie_word_embeddings:
        counts["head"], counts["embedding"] = counts["embedding"], 0
    return counts


def active_parameters(config: ModelConfig, *, embedding: bool = False, head: bool = True) -> int:
    """The "activated" count of a model card. The usual convention, that of the Kimi K3 report too, has the head and not the embedding."""
    counts = active_counts(config)
    excluded = (0 if embedding else counts["embedding"]) + (0 if head else counts["head"])
    return sum(counts.values()) - excluded
