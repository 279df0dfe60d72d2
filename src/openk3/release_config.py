"""The release's `config.json`, in and out.

Two layouts: Kimi K3 (`model_type: kimi_k3`, the text model nested under `text_config`) and Kimi-Linear (`model_type: kimi_linear`, flat).
Every key is one of: a field of `ModelConfig` (some have two spellings in the wild; both given and different is an error), a key that
changes nothing in the text model's arithmetic (kept, and written back), or an error. An absent key takes the default that the release's
own configuration class has, which is often not the released value.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openk3 import config_rules
from openk3.config import ModelConfig
from openk3.errors import UserError


@dataclass(frozen=True)
class Key:
    """One field of ModelConfig in a `config.json`: its spellings, the one we write first, and what absence means."""

    field: str
    spellings: tuple[str, ...]
    default: Any


TEXT_KEYS = (
    Key("vocab_size", ("vocab_size",), 163840),
    Key("hidden_size", ("hidden_size",), 4096),
    Key("num_layers", ("num_hidden_layers",), 32),
    Key("num_heads", ("num_attention_heads",), 32),
    Key("q_lora_rank", ("q_lora_rank",), None),
    Key("kv_lora_rank", ("kv_lora_rank",), None),
    Key("qk_nope_head_dim", ("qk_nope_head_dim",), None),
    Key("qk_rope_head_dim", ("qk_rope_head_dim",), None),
    Key("v_head_dim", ("v_head_dim",), None),
    Key("mla_output_gate", ("mla_use_output_gate",), False),
    Key("intermediate_size", ("intermediate_size",), 11008),
    Key("activation", ("hidden_act",), "silu"),
    Key("situ_beta", ("activation_situ_beta",), None),
    Key("situ_linear_beta", ("activation_situ_linear_beta",), None),
    Key("num_experts", ("num_experts", "num_local_experts"), None),
    Key("experts_per_token", ("num_experts_per_token", "num_experts_per_tok"), None),
    Key("num_shared_experts", ("num_shared_experts", "n_shared_experts"), 0),
    Key("moe_intermediate_size", ("moe_intermediate_size",), None),
    Key("first_dense_layers", ("first_k_dense_replace",), 0),
    Key("moe_layer_freq", ("moe_layer_freq",), 1),
    Key("latent_size", ("routed_expert_hidden_size",), None),
    Key("latent_norm", ("latent_moe_use_norm",), False),
    Key("router_activation", ("moe_router_activation_func", "scoring_func"), "sigmoid"),
    Key("renormalize", ("moe_renormalize", "norm_topk_prob"), True),
    Key("routed_scaling_factor", ("routed_scaling_factor",), 1.0),
    Key("num_expert_groups", ("num_expert_group", "n_group"), 1),
    Key("topk_groups", ("topk_group",), 1),
    Key("attn_res_block_size", ("attn_res_block_size",), None),
    Key("rms_norm_eps", ("rms_norm_eps",), 1e-6),
    Key("tie_word_embeddings", ("tie_word_embeddings",), False),
    Key("max_position_embeddings", ("max_position_embeddings",), 4096),
    Key("bos_token_id", ("bos_token_id",), 1),
    Key("eos_token_id", ("eos_token_id",), 2),
    Key("pad_token_id", ("pad_token_id",), 0),
)


def read(source: Mapping[str, Any] | str | Path) -> ModelConfig:
    if isinstance(source, (str, Path)):
        path = Path(source)
        if path.is_dir():
            path = path / "config.json"
        raw = json.loads(path.read_text())
    else:
        raw = dict(source)
    nested = "text_config" in raw
    text = dict(raw["text_config"] if nested else raw)
    fields: dict[str, Any] = {"family": "kimi_k3" if nested else "kimi_linear"}
    used: set[str] = set()
    for key in TEXT_KEYS:
        value = key.default
        for spelling in key.spellings:
            if spelling in text:
                used.add(spelling)
                value = text[spelling]
        fields[key.field] = value
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "experts_per_token", "moe_intermediate_size", "num_shared_experts"):
        fields[name] = fields[name] or 0
    linear = text.get("linear_attn_config")
    fields["kda_num_heads"] = fields["kda_head_dim"] = fields["kda_conv_size"] = 0
    fields["kda_full_rank_gate"], fields["kda_gate_lower_bound"] = False, None
    if linear is None:
        fields["mla_layers"] = tuple(range(fields["num_layers"]))
    else:
        fields["mla_layers"] = tuple(sorted(i - 1 for i in linear["full_attn_layers"]))
        fields["kda_num_heads"], fields["kda_head_dim"] = linear["num_heads"], linear["head_dim"]
        fields["kda_conv_size"] = linear["short_conv_kernel_size"]
        fields["kda_full_rank_gate"] = linear.get("use_full_rank_gate", False)
        fields["kda_gate_lower_bound"] = linear.get("gate_lower_bound")
    kept = {"text": {k: v for k, v in text.items() if k not in used | {"linear_attn_config"}}}
    if nested:
        kept["top"] = {k: v for k, v in raw.items() if k != "text_config"}
    return ModelConfig(**fields, passthrough=kept)


def write(config: ModelConfig, *, dtype: str | None = None) -> dict[str, Any]:
    text = copy.deepcopy(config.passthrough.get("text", {}))
    for key in TEXT_KEYS:
        text[key.spellings[0]] = getattr(config, key.field)
    text["num_key_value_heads"] = config.num_heads
    text["mla_use_nope"] = True
    text["model_type"] = "kimi_linear"
    text["linear_attn_config"] = {
        "full_attn_layers": [i + 1 for i in config.mla_layers],
        "kda_layers": [i + 1 for i in config.kda_layers],
        "head_dim": config.kda_head_dim,
        "num_heads": config.kda_num_heads,
        "short_conv_kernel_size": config.kda_conv_size,
        "use_full_rank_gate": config.kda_full_rank_gate,
        "gate_lower_bound": config.kda_gate_lower_bound,
    }
    if dtype is not None:
        text["dtype"] = dtype
    if config.family == "kimi_linear":
        return text
    top = copy.deepcopy(config.passthrough.get("top", {}))
    top["model_type"] = "kimi_k3"
    top["text_config"] = text
    if dtype is not None:
        top["dtype"] = dtype
    return top
