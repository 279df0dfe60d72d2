"""Named configs, as functions: `NAMED["debug13"]()`, or `ModelConfig.named("debug13")`.

Each is a starting point: `nano().replace(attn_res_block_size=None)` is an ablation, `k3().replace(mla_layers=tuple(range(93)))` a twin.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openk3.config import ModelConfig
from openk3.config_rules import nearest
from openk3.errors import UserError


def _hybrid(layers: int) -> tuple[int, ...]:
    """The release's pattern: full attention in every fourth layer and in the last; three of four layers are KDA."""
    return tuple(sorted({*range(3, layers, 4), layers - 1}))


def _like_k3(**sizes: Any) -> ModelConfig:
    """A K3 of other sizes: every system on, with the release's constants."""
    return ModelConfig(
        family="kimi_k3",
        mla_output_gate=True,
        kda_conv_size=4,
        kda_full_rank_gate=True,
        kda_gate_lower_bound=-5.0,
        activation="situ",
        situ_beta=4.0,
        situ_linear_beta=25.0,
        first_dense_layers=1,
        moe_layer_freq=1,
        latent_norm=True,
        router_activation="sigmoid",
        renormalize=True,
        routed_scaling_factor=1.0,
        rms_norm_eps=1e-5,
        **sizes,
    )


def debug13() -> ModelConfig:
    """Every kind of layer at toy widths: two full AttnRes blocks and a short one, the last two layers MLA. For tests."""
    return _like_k3(
        vocab_size=256,
        hidden_size=64,
        num_layers=13,
        mla_layers=_hybrid(13),
        num_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        kda_num_heads=4,
        kda_head_dim=16,
        intermediate_size=96,
        num_experts=8,
        experts_per_token=2,
        num_shared_experts=2,
        moe_intermediate_size=32,
        latent_size=32,
        attn_res_block_size=6,
        max_position_embeddings=1024,
        bos_token_id=252,
        eos_token_id=253,
        pad_token_id=255,
    )


def nano() -> ModelConfig:
    """What `openk3 demo` trains in about four minutes on two CPU cores: every system, small enough to see half a million tokens."""
    return _like_k3(
        vocab_size=2048,
        hidden_size=128,
        num_layers=4,
        mla_layers=(3,),
        num_heads=4,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        kda_num_heads=2,
        kda_head_dim=64,
        intermediate_size=256,
        num_experts=8,
        experts_per_token=2,
        num_shared_experts=2,
        moe_intermediate_size=64,
        latent_size=64,
        attn_res_block_size=2,
        max_position_embeddings=4096,
        bos_token_id=2041,
        eos_token_id=2042,
        pad_token_id=2043,
    )


def mini() -> ModelConfig:
    """About 30 M parameters: hours on a laptop's CPU, minutes on one GPU."""
    return _like_k3(
        vocab_size=8192,
        hidden_size=384,
        num_layers=8,
        mla_layers=_hybrid(8),
        num_heads=6,
        q_lora_rank=192,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        kda_num_heads=6,
        kda_head_dim=64,
        intermediate_size=1024,
        num_experts=24,
        experts_per_token=4,
        num_shared_experts=2,
        moe_intermediate_size=128,
        latent_size=192,
        attn_res_block_size=3,
        max_position_embeddings=8192,
        bos_token_id=8185,
        eos_token_id=8186,
        pad_token_id=8187,
    )


def mid() -> ModelConfig:
    """About 0.5 B parameters, 0.18 B of them active: what the benchmarks of inference run."""
    return _like_k3(
        vocab_size=32768,
        hidden_size=768,
        num_layers=13,
        mla_layers=_hybrid(13),
        num_heads=12,
        q_lora_rank=384,
        kv_lora_rank=256,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        kda_num_heads=12,
        kda_head_dim=128,
        intermediate_size=2048,
        num_experts=64,
        experts_per_token=8,
        num_shared_experts=2,
        moe_intermediate_size=384,
        latent_size=384,
        attn_res_block_size=4,
        max_position_embeddings=1048576,
        bos_token_id=32512,
        eos_token_id=32514,
        pad_token_id=32767,
    )


def k3() -> ModelConfig:
    """The release: 2.78 T parameters, 104.2 B of them active (Kimi K3 report, Table 1, and the released config)."""
    return _like_k3(
        vocab_size=163840,
        hidden_size=7168,
        num_layers=93,
        mla_layers=_hybrid(93),
        num_heads=96,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        kda_num_heads=96,
        kda_head_dim=128,
        intermediate_size=33792,
        num_experts=896,
        experts_per_token=16,
        num_shared_experts=2,
        moe_intermediate_size=3072,
        latent_size=3584,
        attn_res_block_size=12,
        max_position_embeddings=1048576,
        bos_token_id=163584,
        eos_token_id=163586,
        pad_token_id=163839,
    )


def kimi_linear_48b() -> ModelConfig:
    """Kimi-Linear-48B-A3B (arXiv 2510.26692): softplus gate, low-rank output gate, plain MoE, SwiGLU, plain residuals."""
    return ModelConfig(
        family="kimi_linear",
        vocab_size=163840,
        hidden_size=2304,
        num_layers=27,
        mla_layers=_hybrid(27),
        num_heads=32,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        mla_output_gate=False,
        kda_num_heads=32,
        kda_head_dim=128,
        kda_full_rank_gate=False,
        kda_gate_lower_bound=None,
        intermediate_size=9216,
        activation="silu",
        num_experts=256,
        experts_per_token=8,
        num_shared_experts=1,
        moe_intermediate_size=1024,
        first_dense_layers=1,
        routed_scaling_factor=2.446,
        attn_res_block_size=None,
        max_position_embeddings=1048576,
        bos_token_id=163584,
        eos_token_id=163586,
        pad_token_id=163839,
    )


NAMED: dict[str, Callable[[], ModelConfig]] = {function.__name__: function for function in (debug13, nano, mini, mid, kimi_linear_48b, k3)}


def build(name: str) -> ModelConfig:
    """The named config `name`. Raises UserError, listing the names, for another."""
    if name not in NAMED:
        raise UserError(f"no config is named {name!r}{nearest(name, NAMED)}; there are {', '.join(NAMED)}")
    return NAMED[name]()
