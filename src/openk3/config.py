"""`ModelConfig`: everything that decides the shape and the arithmetic of a model, checked when it is made.

One dataclass describes both families: Kimi K3 (bounded gate, full-rank output gate, latent MoE, SiTU-GLU, attention residuals) and
Kimi-Linear (softplus gate, low-rank output gate, plain MoE, SwiGLU, plain residuals). Every system has a switch, so an ablation is a
config: `config.replace(attn_res_block_size=None)`.

Text only: images, rotary MLA and multi-token prediction are refused when a config asks for them.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openk3 import config_rules
from openk3.errors import UserError

_REALS = ("situ_beta", "situ_linear_beta", "kda_gate_lower_bound", "routed_scaling_factor", "rms_norm_eps")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape and arithmetic of one model. Layers count from 0. Raises UserError, naming field and rule, when the fields do not fit.

    Sizes of a system that no layer uses (KDA when every layer is MLA, MoE when `num_experts` is None, …) may be 0 and are ignored.
    """

    family: str = "kimi_k3"
    """`kimi_k3` or `kimi_linear`: decides only the layout that is written."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    mla_layers: tuple[int, ...]
    """The layers that hold Gated MLA, increasing; every other layer holds KDA. `()` is all KDA."""

    num_heads: int
    """Heads of MLA."""
    q_lora_rank: int | None
    """Width of the compressed query; None: one full query projection."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """Width of the key part that all heads share. Nothing rotates it (NoPE)."""
    v_head_dim: int
    mla_output_gate: bool

    kda_num_heads: int
    kda_head_dim: int
    """K and V of a KDA head, which are equal."""
    kda_conv_size: int = 4
    """Taps of the short causal convolution."""
    kda_full_rank_gate: bool
    kda_gate_lower_bound: float | None
    """Lower bound of the log decay, below 0; None: the unbounded softplus gate."""

    intermediate_size: int
    """Width of a dense layer's MLP."""
    activation: str
    """`situ` (SiTU-GLU) or `silu` (SwiGLU)."""
    situ_beta: float | None = None
    """None means 1."""
    situ_linear_beta: float | None = None
    """None leaves the up branch as it is."""

    num_experts: int | None
    """None: every layer's MLP is dense."""
    experts_per_token: int = 0
    num_shared_experts: int = 0
    moe_intermediate_size: int = 0
    """Width of one routed expert; the shared MLP is `num_shared_experts` times as wide."""
    first_dense_layers: int = 0
    moe_layer_freq: int = 1
    latent_size: int | None = None
    """Width in which routed experts work; None: the hidden size, without latent projections."""
    latent_norm: bool = False
    router_activation: str = "sigmoid"
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    num_expert_groups: int = 1
    topk_groups: int = 1

    attn_res_block_size: int | None
    """Layers in a block of attention residuals; None: plain residuals."""

    rms_norm_eps: float = 1e-5
    """For every norm but those on MLA's compressed query and latent, which always use 1e-6."""
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1048576
    """What the model was trained for. No arithmetic depends on it: there is no positional encoding."""
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    passthrough: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Keys of the `config.json` it was read from that change nothing here, kept to be written back. Not part of equality."""

    def __post_init__(self) -> None:
        layers: object = self.mla_layers
        if isinstance(layers, list):  # as JSON and TOML give it
            object.__setattr__(self, "mla_layers", tuple(layers))
        config_rules.check({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})
        for name in _REALS:
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else float(value))
        object.__setattr__(self, "passthrough", copy.deepcopy(dict(self.passthrough)))

    def is_mla(self, layer: int) -> bool:
        """Whether `layer` (from 0) holds Gated MLA."""
        return layer in self.mla_layers

    def is_kda(self, layer: int) -> bool:
        """Whether `layer` (from 0) holds KDA."""
        return layer not in self.mla_layers

    def is_moe(self, layer: int) -> bool:
        """Whether `layer`'s MLP is a mixture of experts."""
        return self.num_experts is not None and layer >= self.first_dense_layers and layer % self.moe_layer_freq == 0

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """The layers that hold KDA, increasing."""
        return tuple(sorted(set(range(self.num_layers)) - set(self.mla_layers)))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers whose MLP is a mixture of experts, increasing."""
        return tuple(layer for layer in range(self.num_layers) if self.is_moe(layer))

    @property
    def attn_res_blocks(self) -> tuple[int, ...]:
        """The first layer of each block of attention residuals; `()` with plain residuals."""
        if self.attn_res_block_size is None:
            return ()
        return tuple(range(0, self.num_layers, self.attn_res_block_size))

    @property
    def qk_head_dim(self) -> int:
        """Width of an MLA head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kda_width(self) -> int:
        """P, the width of KDA's q, k and v: heads × head width."""
        return self.kda_num_heads * self.kda_head_dim

    @property
    def expert_width(self) -> int:
        """The width in which routed experts work: the latent, or the hidden size without one."""
        return self.hidden_size if self.latent_size is None else self.latent_size

    @property
    def shared_width(self) -> int:
        """Width of the one MLP that the shared experts form; 0 without them."""
        return self.num_shared_experts * self.moe_intermediate_size

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed. Raises UserError for a name that is not a field, or when the result is not valid."""
        known = [f.name for f in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise UserError(f"ModelConfig has no field {name!r}{config_rules.nearest(name, known)}")
        return dataclasses.replace(self, **changes)

    @staticmethod
    def from_json(source: Mapping[str, Any] | str | Path) -> ModelConfig:
        """Read the release's `config.json`: a parsed one, the path of one, or a directory that holds one.

        Raises UserError naming the key that is unknown, contradictory, out of range or not supported.
        """
        from openk3 import release_config

        return release_config.read(source)

    def to_json(self, *, dtype: str | None = None) -> dict[str, Any]:
        """The release's `config.json` of this config, for `json.dump`. `from_json` of it gives an equal config.

        `dtype` (`"bfloat16"`, …) states the dtype of the weights beside it; None keeps what the config was read with.
        """
        from openk3 import release_config

        return release_config.write(self, dtype=dtype)

    @staticmethod
    def named(name: str) -> ModelConfig:
        """One of the configs of `openk3.named`. Raises UserError for another name."""
        from openk3 import named

        return named.build(name)


def resolve(source: ModelConfig | Mapping[str, Any] | str | Path) -> ModelConfig:
    """A config from whatever names one: itself, a parsed `config.json`, a name such as `"debug13"`, or a path.

    A path may be a `config.json` or a directory that holds one; to read a directory that bears the name of a named config, write `./nano`.
    Raises UserError when it is none of these.
    """
    if isinstance(source, ModelConfig):
        return source
    if isinstance(source, str):
        from openk3 import named

        if source in named.NAMED:
            return named.NAMED[source]()
        if not Path(source).exists():
            raise UserError(f"{source!r} is neither a named config ({', '.join(named.NAMED)}) nor a path that exists")
    return ModelConfig.from_json(source)
