"""The named configs: what each promises."""

from __future__ import annotations

import pytest

from openk3 import accounting
from openk3.config import ModelConfig
from openk3.errors import UserError
from openk3.named import NAMED, build


@pytest.mark.parametrize("name", NAMED)
def test_is_written_and_read(name: str) -> None:
    config = build(name)
    assert ModelConfig.named(name) == config and ModelConfig.from_json(config.to_json()) == config
    assert NAMED[name].__doc__


def test_names() -> None:
    assert set(NAMED) == {"debug13", "nano", "mini", "mid", "kimi_linear_48b", "k3"}
    with pytest.raises(UserError, match=r"'nanno'; did you mean 'nano'\?; there are debug13, "):
        build("nanno")


def test_debug13_holds_every_kind() -> None:
    config = build("debug13")
    assert config.num_layers == 13 and config.attn_res_blocks == (0, 6, 12)
    assert config.is_mla(11) and config.is_mla(12)
    kinds = {(config.is_mla(layer), config.is_moe(layer)) for layer in range(13)}
    assert kinds == {(False, False), (False, True), (True, True)}
    assert config.kda_head_dim == 16 and config.vocab_size == 256 and config.hidden_size <= 64


@pytest.mark.parametrize("name", ["nano", "mini", "mid"])
def test_trainable_ones_have_every_system(name: str) -> None:
    config = build(name)
    assert all(accounting.parameter_counts(config).values())
    assert len(config.attn_res_blocks) >= 2 and config.kda_layers and config.mla_layers
    assert config.is_mla(config.num_layers - 1)
    # Blocks of 32 columns: the widths that MXFP4 packs must be whole blocks.
    assert config.expert_width % 32 == 0 and config.moe_intermediate_size % 32 == 0


def test_sizes() -> None:
    assert 1e6 < accounting.total_parameters(build("nano")) < 15e6
    assert 27e6 < accounting.total_parameters(build("mini")) < 33e6
    # 498 M and 176 M active; its files hold 9 · (128 − 12) more for the padding of A_log.
    assert accounting.total_parameters(build("mid")) == 498_047_212
    assert accounting.stored_parameters(build("mid")) == 498_048_256
    assert accounting.active_parameters(build("mid")) == 175_610_092


def test_mid_is_what_was_asked() -> None:
    config = build("mid")
    assert (config.hidden_size, config.num_layers, config.num_heads, config.kda_num_heads, config.kda_head_dim) == (768, 13, 12, 12, 128)
    assert (config.q_lora_rank, config.kv_lora_rank, config.num_experts, config.experts_per_token) == (384, 256, 64, 8)
    assert (config.num_shared_experts, config.latent_size, config.moe_intermediate_size) == (2, 384, 384)
    assert (config.attn_res_block_size, config.vocab_size, config.mla_layers) == (4, 32768, (3, 7, 11, 12))


def test_the_release() -> None:
    text = build("k3").to_json()["text_config"]
    assert text["linear_attn_config"]["full_attn_layers"] == [*range(4, 93, 4), 93]
    assert len(text["linear_attn_config"]["kda_layers"]) == 69
    expected = {
        "vocab_size": 163840, "hidden_size": 7168, "num_hidden_layers": 93, "num_attention_heads": 96, "num_key_value_heads": 96,
        "intermediate_size": 33792, "moe_intermediate_size": 3072, "num_experts": 896, "num_experts_per_token": 16,
        "num_shared_experts": 2, "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True, "routed_scaling_factor": 1.0,
        "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "mla_use_output_gate": True, "attn_res_block_size": 12,
        "hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "rms_norm_eps": 1e-5,
        "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839, "tie_word_embeddings": False,
        "max_position_embeddings": 1048576, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    assert {key: text[key] for key in expected} == expected
    linear = {"head_dim": 128, "num_heads": 96, "short_conv_kernel_size": 4, "use_full_rank_gate": True, "gate_lower_bound": -5.0}
    assert {key: text["linear_attn_config"][key] for key in linear} == linear


def test_kimi_linear() -> None:
    config = build("kimi_linear_48b")
    assert [layer + 1 for layer in config.mla_layers] == [4, 8, 12, 16, 20, 24, 27]
    assert accounting.total_parameters(config) == accounting.stored_parameters(config) == 49_122_681_728
    written = config.to_json()
    assert written["model_type"] == "kimi_linear" and "text_config" not in written
    # What only K3 has is not in a Kimi-Linear file.
    assert not {"attn_res_block_size", "routed_expert_hidden_size", "activation_situ_beta", "mla_use_output_gate"} & set(written)
    assert set(written["linear_attn_config"]) == {"kda_layers", "full_attn_layers", "num_heads", "head_dim", "short_conv_kernel_size"}
