"""Named configs, as functions: `NAMED["debug13"]()`."""

from __future__ import annotations

from collections.abc import Callable

from openk3.config import ModelConfig
from openk3.config_rules import nearest
from openk3.errors import UserError


def _hybrid(layers: int) -> tuple[int, ...]:
    """The release's pattern: full attention in every fourth layer and in the last."""
    return tuple(sorted({*range(3, layers, 4), layers - 1}))


def debug13() -> ModelConfig:
    """Every kind of layer at toy widths: two full AttnRes blocks and a short one, the last two layers MLA. For tests."""
    return ModelConfig(
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
        mla_output_gate=True,
        kda_num_heads=4,
        kda_head_dim=16,
        kda_full_rank_gate=True,
        kda_gate_lower_bound=-5.0,
        intermediate_size=96,
        activation="situ",
        situ_beta=4.0,
        situ_linear_beta=25.0,
        num_experts=8,
        experts_per_token=2,
        num_shared_experts=2,
        moe_intermediate_size=32,
        first_dense_layers=1,
        latent_size=32,
        latent_norm=True,
        attn_res_block_size=6,
        max_position_embeddings=1024,
        bos_token_id=252,
        eos_token_id=253,
        pad_token_id=255,
    )


def nano() -> ModelConfig:
    """What the demo trains in minutes on two CPU cores."""
    return debug13().replace(
        vocab_size=4096,
        hidden_size=192,
        num_layers=6,
        mla_layers=(3, 5),
        num_heads=4,
        q_lora_rank=64,
        kv_lora_rank=48,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=48,
        kda_num_heads=4,
        kda_head_dim=48,
        intermediate_size=512,
        num_experts=16,
        experts_per_token=4,
        num_shared_experts=1,
        moe_intermediate_size=96,
        latent_size=96,
        attn_res_block_size=2,
        bos_token_id=4089,
        eos_token_id=4090,
        pad_token_id=4095,
    )


NAMED: dict[str, Callable[[], ModelConfig]] = {"debug13": debug13, "nano": nano}


def build(name: str) -> ModelConfig:
    """The named config `name`. Raises UserError, listing the names, for another."""
    if name not in NAMED:
        raise UserError(f"no config is named {name!r}{nearest(name, NAMED)}; there are {', '.join(NAMED)}")
    return NAMED[name]()
