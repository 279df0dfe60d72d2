"""`ModelConfig`: its rules, what it derives, how sources resolve."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from openk3.config import ModelConfig, resolve
from openk3.errors import UserError


def debug(**changes: Any) -> ModelConfig:
    return ModelConfig.named("debug13").replace(**changes)


def test_layers_of_each_kind() -> None:
    config = debug()
    assert config.mla_layers == (3, 7, 11, 12)
    assert config.kda_layers == (0, 1, 2, 4, 5, 6, 8, 9, 10)
    assert [config.is_mla(layer) for layer in (0, 3, 12)] == [False, True, True]
    assert [config.is_kda(layer) for layer in (0, 3, 12)] == [True, False, False]
    assert config.moe_layers == tuple(range(1, 13))
    assert debug(first_dense_layers=0, moe_layer_freq=3).moe_layers == (0, 3, 6, 9, 12)
    assert debug(first_dense_layers=4, moe_layer_freq=3).moe_layers == (6, 9, 12)
    assert debug(num_experts=None).moe_layers == ()


@pytest.mark.parametrize(("layers", "size", "starts"), [(13, 3, (0, 3, 6, 9, 12)), (13, 6, (0, 6, 12)), (13, None, ()), (13, 100, (0,))])
def test_blocks_count_layers(layers: int, size: int | None, starts: tuple[int, ...]) -> None:
    assert debug(num_layers=layers, attn_res_block_size=size).attn_res_blocks == starts


def test_release_has_eight_blocks_the_last_of_nine_layers() -> None:
    assert ModelConfig.named("k3").attn_res_blocks == (0, 12, 24, 36, 48, 60, 72, 84)


def test_derived_widths() -> None:
    config = debug()
    assert (config.qk_head_dim, config.kda_width, config.expert_width, config.shared_width) == (24, 64, 32, 64)
    assert debug(latent_size=None).expert_width == 64
    assert debug(num_shared_experts=0).shared_width == 0


def test_numbers_are_normalised() -> None:
    config = debug(situ_beta=4, routed_scaling_factor=1, mla_layers=[3, 7])
    assert isinstance(config.situ_beta, float) and isinstance(config.routed_scaling_factor, float)
    assert config.mla_layers == (3, 7)


def test_frozen_hashable_and_copied() -> None:
    config = debug()
    with pytest.raises(AttributeError):
        config.hidden_size = 3  # type: ignore[misc]
    assert {config: 1}[debug()] == 1
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    kept = {"text": {"rope_theta": 1.0}}
    other = debug(passthrough=kept)
    kept["text"]["rope_theta"] = 2.0
    assert other.passthrough == {"text": {"rope_theta": 1.0}}
    assert other == config


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("family", "llama", "kimi_k3, kimi_linear"),
        ("vocab_size", 0, "from 1"),
        ("hidden_size", -1, "from 1"),
        ("hidden_size", 64.0, "whole number"),
        ("hidden_size", True, "whole number"),
        ("hidden_size", 2**31, "to 2147483647"),
        ("num_layers", 10**9, "to 10000"),
        ("mla_layers", (13,), "13"),
        ("mla_layers", (-1, 3), "counted from 0"),
        ("mla_layers", (3, 3), "increasing"),
        ("mla_layers", (7, 3), "increasing"),
        ("mla_layers", ("3",), "whole numbers"),
        ("mla_layers", 3, "sequence"),
        ("q_lora_rank", 0, "or null"),
        ("kv_lora_rank", 0, "from 1"),
        ("v_head_dim", 0, "from 1"),
        ("kda_head_dim", 0, "from 1"),
        ("kda_conv_size", 0, "from 1"),
        ("kda_full_rank_gate", 1, "true or false"),
        ("kda_gate_lower_bound", 0.0, "below 0"),
        ("kda_gate_lower_bound", 5, "below 0"),
        ("kda_gate_lower_bound", float("-inf"), "below 0"),
        ("activation", "gelu", "situ, silu"),
        ("activation", None, "situ, silu"),
        ("situ_beta", 0.0, "above 0"),
        ("situ_linear_beta", float("nan"), "above 0"),
        ("num_experts", 0, "from 1"),
        ("experts_per_token", 9, "more experts than the 8"),
        ("experts_per_token", 0, "from 1"),
        ("moe_intermediate_size", 0, "from 1"),
        ("moe_layer_freq", 0, "from 1"),
        ("latent_size", 0, "or null"),
        ("router_activation", "relu", "sigmoid, softmax"),
        ("routed_scaling_factor", 0.0, "above 0"),
        ("routed_scaling_factor", 10**400, "above 0"),
        ("num_expert_groups", 3, "must divide"),
        ("topk_groups", 2, "more groups kept"),
        ("attn_res_block_size", 0, "or null"),
        ("rms_norm_eps", 0.0, "above 0"),
        ("rms_norm_eps", 1.0, "below 1"),
        ("bos_token_id", 256, "below vocab_size=256"),
        ("eos_token_id", -1, "from 0"),
        ("tie_word_embeddings", "no", "true or false"),
        ("max_position_embeddings", 0, "from 1"),
    ],
)
def test_each_rule_names_the_field(field: str, value: Any, says: str) -> None:
    with pytest.raises(UserError, match=f"^{field} is ") as caught:
        debug(**{field: value})
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_groups() -> None:
    assert debug(num_expert_groups=4, topk_groups=2).topk_groups == 2
    with pytest.raises(UserError, match=r"hold only 2 experts"):
        debug(num_expert_groups=4, topk_groups=1, experts_per_token=3)
    with pytest.raises(UserError, match=r"needs at least two"):
        debug(num_expert_groups=8, topk_groups=4)


def test_keys_of_width_zero_are_no_keys() -> None:
    with pytest.raises(UserError, match=r"no keys to compare"):
        debug(qk_nope_head_dim=0, qk_rope_head_dim=0)
    assert debug(qk_rope_head_dim=0).qk_head_dim == 16


@pytest.mark.parametrize(
    "changes",
    [
        {"mla_layers": (), "kv_lora_rank": 0, "v_head_dim": 0, "qk_nope_head_dim": 0, "qk_rope_head_dim": 0},
        {"mla_layers": tuple(range(13)), "kda_num_heads": 0, "kda_head_dim": 0, "kda_conv_size": 0},
        {"num_experts": None, "experts_per_token": 0, "moe_intermediate_size": 0},
        {"latent_size": None},
        {"latent_norm": False},
        {"attn_res_block_size": None},
        {"num_shared_experts": 0},
        {"mla_output_gate": False},
        {"kda_full_rank_gate": False},
        {"kda_gate_lower_bound": None},
        {"activation": "silu"},
        {"q_lora_rank": None},
    ],
    ids=str,
)
def test_every_system_has_a_switch(changes: dict[str, Any]) -> None:
    config = debug(**changes)
    assert config != debug() and ModelConfig.from_json(config.to_json()) == config


def test_replace_names_an_unknown_field() -> None:
    with pytest.raises(UserError, match=r"no field 'hidden'; did you mean 'hidden_size'"):
        debug(hidden=3)


def test_resolve(tmp_path: Path) -> None:
    config = debug()
    assert resolve(config) is config
    assert resolve("debug13") == config
    assert resolve(config.to_json()) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_json()))
    assert resolve(tmp_path) == resolve(str(tmp_path)) == resolve(tmp_path / "config.json") == config
    with pytest.raises(UserError, match=r"neither a named config \(debug13, .*k3\) nor a path"):
        resolve("debug14")


def test_import_is_light() -> None:
    # Processor time of the import alone: the wall clock of a busy machine says nothing.
    code = "import time, sys; t = time.process_time(); import openk3.config; print('torch' in sys.modules, time.process_time() - t)"
    times = []
    for _ in range(3):
        torch, seconds = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        assert torch == "False"
        times.append(float(seconds))
    assert min(times) < 0.1
