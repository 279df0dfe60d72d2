"""The release's `config.json`: what is read, what is refused and in which words, and that what is written means the same."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openk3 import release_keys
from openk3.config import ModelConfig
from openk3.errors import UserError

ORACLES = Path(__file__).parent / "oracles"
MODELS = ("k3_tiny", "k3_tiny_mxfp4", "kimi_linear_tiny_release")
DROP = object()


def raw(name: str = "k3_tiny") -> dict[str, Any]:
    value: dict[str, Any] = json.loads((ORACLES / name / "model" / "config.json").read_text())
    return value


def with_text(name: str = "k3_tiny", **changes: Any) -> dict[str, Any]:
    """The file with keys of its text level changed; DROP removes one; `linear_…` reaches into linear_attn_config."""
    value = raw(name)
    for key, change in changes.items():
        level = value.get("text_config", value)
        if key.startswith("linear__"):
            level, key = level["linear_attn_config"], key.removeprefix("linear__")
        if change is DROP:
            del level[key]
        else:
            level[key] = change
    return value


def refused(source: Any, match: str) -> str:
    with pytest.raises(UserError, match=match) as caught:
        ModelConfig.from_json(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_k3_tiny() -> None:
    config = ModelConfig.from_json(ORACLES / "k3_tiny" / "model")
    assert config == ModelConfig(
        family="kimi_k3", vocab_size=256, hidden_size=64, num_layers=9, mla_layers=(3, 7, 8), num_heads=4, q_lora_rank=24, kv_lora_rank=16,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, mla_output_gate=True, kda_num_heads=4, kda_head_dim=16, kda_conv_size=4,
        kda_full_rank_gate=True, kda_gate_lower_bound=-5.0, intermediate_size=96, activation="situ", situ_beta=4.0, situ_linear_beta=25.0,
        num_experts=8, experts_per_token=2, num_shared_experts=2, moe_intermediate_size=64, first_dense_layers=1, moe_layer_freq=1,
        latent_size=32, latent_norm=True, router_activation="sigmoid", renormalize=True, routed_scaling_factor=1.0, num_expert_groups=1,
        topk_groups=1, attn_res_block_size=3, rms_norm_eps=1e-5, tie_word_embeddings=False, max_position_embeddings=1024,
        bos_token_id=252, eos_token_id=253, pad_token_id=255,
    )  # fmt: skip


def test_kimi_linear_tiny() -> None:
    config = ModelConfig.from_json(str(ORACLES / "kimi_linear_tiny_release" / "model" / "config.json"))
    assert config == ModelConfig(
        family="kimi_linear", vocab_size=256, hidden_size=64, num_layers=5, mla_layers=(3,), num_heads=4, q_lora_rank=None, kv_lora_rank=16,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, mla_output_gate=False, kda_num_heads=3, kda_head_dim=16, kda_conv_size=4,
        kda_full_rank_gate=False, kda_gate_lower_bound=None, intermediate_size=96, activation="silu", num_experts=8, experts_per_token=2,
        num_shared_experts=1, moe_intermediate_size=48, first_dense_layers=1, routed_scaling_factor=2.446, attn_res_block_size=None,
        rms_norm_eps=1e-5, max_position_embeddings=1024, bos_token_id=252, eos_token_id=253, pad_token_id=255,
    )  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_what_was_read(name: str) -> None:
    """Key by key: inert ones, `vision_config` and `quantization_config` come back as they were."""
    written = ModelConfig.from_json(raw(name)).to_json()
    assert written == raw(name)
    assert ModelConfig.from_json(json.loads(json.dumps(written))) == ModelConfig.from_json(raw(name))


def test_reading_leaves_the_source_alone_and_writing_the_config() -> None:
    source, before = raw(), raw()
    config = ModelConfig.from_json(source)
    written = config.to_json()
    written["vision_config"]["patch_size"] = 99
    written["text_config"]["linear_attn_config"]["kda_layers"].clear()
    assert source == before and config.to_json() == before


def test_a_changed_field_is_written_over_what_was_read() -> None:
    config = ModelConfig.from_json(raw()).replace(attn_res_block_size=None, bos_token_id=7)
    written = config.to_json()
    assert written["bos_token_id"] == written["text_config"]["bos_token_id"] == 7
    assert written["text_config"]["attn_res_block_size"] is None
    assert written["vision_config"] == raw()["vision_config"]


def test_the_dtype_can_be_stated() -> None:
    written = ModelConfig.from_json(raw()).to_json(dtype="bfloat16")
    assert written["dtype"] == written["text_config"]["dtype"] == "bfloat16"
    old = with_text("kimi_linear_tiny_release", dtype=DROP, torch_dtype="float32")
    assert ModelConfig.from_json(old).to_json(dtype="bfloat16")["torch_dtype"] == "bfloat16"


def test_absent_keys_take_the_defaults_of_the_releases_class() -> None:
    config = ModelConfig.from_json({"model_type": "kimi_linear", "mla_use_nope": True, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
                                    "qk_rope_head_dim": 2, "v_head_dim": 4})  # fmt: skip
    assert config == ModelConfig(
        family="kimi_linear", vocab_size=163840, hidden_size=4096, num_layers=32, mla_layers=tuple(range(32)), num_heads=32,
        q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4, mla_output_gate=False, kda_num_heads=0,
        kda_head_dim=0, kda_conv_size=0, kda_full_rank_gate=False, kda_gate_lower_bound=None, intermediate_size=11008, activation="silu",
        num_experts=None, experts_per_token=0, num_shared_experts=0, moe_intermediate_size=0, first_dense_layers=0, moe_layer_freq=1,
        latent_size=None, latent_norm=False, router_activation="sigmoid", renormalize=True, routed_scaling_factor=1.0,
        attn_res_block_size=None, rms_norm_eps=1e-6, tie_word_embeddings=False, max_position_embeddings=4096,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    assert ModelConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("key", "field", "default"),
    [
        ("rms_norm_eps", "rms_norm_eps", 1e-6),
        ("first_k_dense_replace", "first_dense_layers", 0),
        ("latent_moe_use_norm", "latent_norm", False),
        ("mla_use_output_gate", "mla_output_gate", False),
        ("linear__use_full_rank_gate", "kda_full_rank_gate", False),
        ("linear__gate_lower_bound", "kda_gate_lower_bound", None),
        ("num_shared_experts", "num_shared_experts", 0),
        ("attn_res_block_size", "attn_res_block_size", None),
        ("activation_situ_linear_beta", "situ_linear_beta", None),
        ("hidden_act", "activation", "silu"),
        ("q_lora_rank", "q_lora_rank", None),
        ("max_position_embeddings", "max_position_embeddings", 4096),
    ],
)
def test_one_absent_key(key: str, field: str, default: Any) -> None:
    assert getattr(ModelConfig.from_json(with_text(**{key: DROP})), field) == default


def test_a_null_gate_bound_is_the_softplus_gate() -> None:
    assert ModelConfig.from_json(with_text(linear__gate_lower_bound=None)).kda_gate_lower_bound is None
    assert ModelConfig.from_json(with_text(num_shared_experts=None)).num_shared_experts == 0
    # The release reads `beta or 1.0`.
    assert ModelConfig.from_json(with_text(activation_situ_beta=0)).situ_beta is None


@pytest.mark.parametrize("key", [key for key in release_keys.TEXT_KEYS if len(key.spellings) > 1], ids=lambda key: key.field)
def test_both_spellings(key: release_keys.Key) -> None:
    first, second = key.spellings
    value = raw()["text_config"].get(first, raw()["text_config"].get(second))
    config = ModelConfig.from_json(raw())
    assert ModelConfig.from_json(with_text(**{first: DROP, second: value})) == config
    assert ModelConfig.from_json(with_text(**{second: value})) == config
    other = {"sigmoid": "softmax", True: False}.get(value, 3)
    refused(with_text(**{second: other}), rf"text_config\.{first} is .*, but text_config\.{second}, another spelling of it, is")


@pytest.mark.parametrize(
    ("flat", "nested", "value"),
    [("linear_head_dim", "head_dim", 16), ("linear_num_heads", "num_heads", 4), ("linear_conv_kernel_dim", "short_conv_kernel_size", 4)],
)
def test_both_spellings_of_kda_sizes(flat: str, nested: str, value: int) -> None:
    config = ModelConfig.from_json(raw())
    assert ModelConfig.from_json(with_text(**{f"linear__{nested}": DROP, flat: value})) == config
    assert ModelConfig.from_json(with_text(**{flat: value})) == config
    refused(with_text(**{flat: 5}), rf"{flat} is 5, but text_config.linear_attn_config.{nested}, another spelling of it, is {value}")


def as_transformers_writes_it() -> dict[str, Any]:
    """What transformers 5.24 saves for the Kimi-Linear of the oracles, where it differs from the release's file."""
    types = ["linear_attention"] * 3 + ["full_attention", "linear_attention"]
    value = with_text("kimi_linear_tiny_release", first_k_dense_replace=DROP, mla_use_nope=DROP, layer_types=types, qk_head_dim=24)
    value |= {"mlp_layer_types": ["dense"] + ["sparse"] * 4, "linear_head_dim": 16, "linear_num_heads": 3, "linear_conv_kernel_dim": 4}
    value |= {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "output_router_logits": False,
        "pretraining_tp": 1,
        "rope_parameters": None,
    }
    return value | {"transformers_version": "5.24.0"}


def test_transformers_own_spelling() -> None:
    config = ModelConfig.from_json(raw("kimi_linear_tiny_release"))
    value = as_transformers_writes_it()
    assert ModelConfig.from_json(value) == config
    del value["linear_attn_config"]
    assert ModelConfig.from_json(value) == config
    # Written in the release's spelling, which transformers reads too.
    written = ModelConfig.from_json(value).to_json()
    assert written["linear_attn_config"] == raw("kimi_linear_tiny_release")["linear_attn_config"]
    assert written["first_k_dense_replace"] == 1 and written["rope_parameters"] is None
    assert not {"layer_types", "mlp_layer_types", "linear_head_dim", "qk_head_dim"} & set(written)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layer_types": ["full_attention"] * 5}, r"layer_types and linear_attn_config disagree about layer 1"),
        ({"layer_types": ["full_attention"] * 4}, r"layer_types must be a list of 5 strings"),
        ({"layer_types": ["sliding"] * 5}, r'layer_types holds "sliding"'),
        ({"mlp_layer_types": ["sparse"] * 2 + ["dense"] + ["sparse"] * 2}, r"mlp_layer_types disagrees with .* about layer 3"),
        ({"mlp_layer_types": ["sparse"] * 5, "first_k_dense_replace": 1}, r"mlp_layer_types disagrees with first_k_dense_replace=1"),
        ({"qk_head_dim": 16}, r"qk_head_dim is 16, but qk_nope_head_dim \+ qk_rope_head_dim is 24"),
    ],
)
def test_transformers_spelling_contradicted(changes: dict[str, Any], match: str) -> None:
    refused(as_transformers_writes_it() | changes, match)


def test_sparse_layers_by_list() -> None:
    value = as_transformers_writes_it() | {"mlp_layer_types": ["dense"] * 5}
    assert ModelConfig.from_json(value).moe_layers == ()
    value |= {"mlp_layer_types": ["dense", "dense", "sparse", "dense", "sparse"], "moe_layer_freq": 2}
    assert ModelConfig.from_json(value).moe_layers == (2, 4)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_expert": 8}, r"text_config\.num_expert is not a known key; did you mean 'num_experts'"),
        ({"vision_config": {}}, r"text_config\.vision_config is not a known key"),
        ({"linear__head_dims": 16}, r"text_config\.linear_attn_config\.head_dims is not a known key; did you mean 'head_dim'"),
        ({"num_nextn_predict_layers": 1}, r"num_nextn_predict_layers is 1: multi-token prediction is not supported"),
        ({"num_nextn_predict_layers": "0"}, r"num_nextn_predict_layers is \"0\": it must be a whole number"),
        ({"mla_use_nope": False}, r"mla_use_nope is false, and text_config\.qk_rope_head_dim is 8: rotary MLA is not supported"),
        ({"mla_use_nope": DROP}, r"mla_use_nope is absent, which means false.*rotary MLA is not supported"),
        ({"mla_use_nope": 1}, r"mla_use_nope is 1: it must be true or false"),
        ({"num_key_value_heads": 2}, r"num_key_value_heads is 2, but text_config\.num_attention_heads is 4"),
        ({"linear__kda_layers": [1, 2, 3, 5, 6]}, r"layer 7 is in neither of .*kda_layers and full_attn_layers"),
        ({"linear__full_attn_layers": [4, 7, 8, 9]}, r"layer 7 is in both of"),
        ({"linear__full_attn_layers": [4, 8, 10]}, r"full_attn_layers names layer 10: layers count from 1 to 9 \(text_config\.num_hidden"),
        ({"linear__kda_layers": [0, 2, 3, 5, 6, 7]}, r"kda_layers names layer 0"),
        ({"linear__kda_layers": [1, 1, 2, 3, 5, 6, 7]}, r"kda_layers names a layer twice"),
        ({"linear__kda_layers": "123567"}, r"kda_layers is .*must be a list of layers"),
        ({"linear__kda_layers": [True, 2, 3, 5, 6, 7]}, r"kda_layers is .*must be a list of layers"),
        ({"linear__kda_layers": DROP, "linear__full_attn_layers": DROP}, r"neither kda_layers nor full_attn_layers"),
        ({"num_hidden_layers": 10}, r"layer 10 is in neither"),
        ({"num_hidden_layers": 10**12}, r"text_config\.num_hidden_layers is .*from 1 to 10000"),
        ({"linear__num_heads": DROP}, r"text_config\.linear_attn_config\.num_heads is not given, but 6 layers are KDA"),
        ({"linear__short_conv_kernel_size": None}, r"short_conv_kernel_size is not given"),
        ({"kv_lora_rank": None}, r"text_config\.kv_lora_rank is not given, but 3 layers are MLA"),
        ({"num_experts_per_token": None}, r"num_experts_per_token is not given, but there are experts \(text_config\.num_experts\)"),
        ({"num_experts_per_token": 9}, r"text_config\.num_experts_per_token is 9: a token cannot go to more experts than the 8"),
        ({"hidden_size": "64"}, r"text_config\.hidden_size is \"64\": it must be a whole number"),
        ({"hidden_size": None}, r"hidden_size is null: it must be a whole number"),
        ({"hidden_size": 0}, r"hidden_size is 0: it must be from 1"),
        ({"hidden_size": -64}, r"hidden_size is -64"),
        ({"rms_norm_eps": float("nan")}, r"text_config\.rms_norm_eps is nan: it must be a finite number"),
        ({"rope_theta": float("inf")}, r"text_config\.rope_theta is inf: it must be a finite number"),
        ({"linear__gate_lower_bound": 5.0}, r"linear_attn_config\.gate_lower_bound is 5\.0: .*below 0"),
        ({"hidden_act": "relu"}, r"text_config\.hidden_act is \"relu\": it must be one of situ, silu"),
        ({"moe_router_activation_func": ["sigmoid"]}, r"moe_router_activation_func is \[\"sigmoid\"\]: it must be one of sigmoid, softmax"),
        ({"tie_word_embeddings": True}, r"tie_word_embeddings is false, but text_config\.tie_word_embeddings is true"),
        ({"bos_token_id": 3}, r"bos_token_id is 252, but text_config\.bos_token_id is 3: they must agree"),
        ({"linear_attn_config": []}, r"linear_attn_config is \[\]: it must be an object"),
        ({"model_type": "llama"}, r'text_config\.model_type is "llama"'),
        ({"vocab_size": 250}, r"text_config\.bos_token_id is 252: it must be below text_config\.vocab_size=250"),
        ({"auto_map": {1: 2}}, r"the key 1 in text_config\.auto_map is not a string"),
        ({"auto_map": {"a": "\ud800"}}, r"auto_map\.a holds half of a character"),
        ({"auto_map": {"a": {1, 2}}}, r"text_config\.auto_map\.a is of type set"),
    ],
)  # fmt: skip
def test_refused(changes: dict[str, Any], match: str) -> None:
    refused(with_text(**changes), match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_size": 64}, r"hidden_size is at the top level: it belongs inside text_config"),
        ({"vission_config": {}}, r"vission_config is not a known key; did you mean 'vision_config'"),
        ({"model_type": "kimi_k2"}, r'model_type is "kimi_k2": openk3 reads kimi_k3 and kimi_linear'),
        ({"model_type": ["kimi_k3"]}, r"model_type is \[\"kimi_k3\"\]"),
        ({"model_type": "kimi_linear"}, r"flat, but there is a text_config"),
        ({"text_config": DROP}, r"model_type is kimi_k3, but there is no text_config"),
        ({"text_config": None}, r"text_config is null: it must be an object"),
        ({"text_config": "x" * 500}, r"text_config is \"x+\.\.\.: it must be an object"),
    ],
)
def test_refused_at_the_top(changes: dict[str, Any], match: str) -> None:
    value = raw() | changes
    message = refused({key: item for key, item in value.items() if item is not DROP}, match)
    assert len(message) < 200


def test_text_only_family() -> None:
    refused(
        raw("kimi_linear_tiny_release") | {"vision_config": {"patch_size": 14}},
        r"vision_config is given, but a kimi_linear model is text only",
    )


def test_one_list_of_layers_is_enough() -> None:
    config = ModelConfig.from_json(raw())
    assert ModelConfig.from_json(with_text(linear__kda_layers=DROP)) == config
    assert ModelConfig.from_json(with_text(linear__full_attn_layers=DROP)) == config
    assert ModelConfig.from_json(with_text(linear__full_attn_layers=[9, 4, 8])) == config


def test_nope_does_not_matter_without_a_shared_key() -> None:
    assert ModelConfig.from_json(with_text(mla_use_nope=False, qk_rope_head_dim=0)).qk_rope_head_dim == 0


def test_ids_may_stand_at_the_top_only() -> None:
    config = ModelConfig.from_json(with_text(bos_token_id=DROP, eos_token_id=DROP))
    assert (config.bos_token_id, config.eos_token_id) == (252, 253)


def test_every_listed_inert_key_is_kept() -> None:
    text, top = with_text(), {}
    for key in release_keys.TEXT_INERT:
        text["text_config"].setdefault(key, {"any": ["thing", None]})
    for key in release_keys.TOP_INERT:
        top[key] = text.setdefault(key, [1, {"two": 3.5}])
    written = ModelConfig.from_json(text).to_json()
    assert written == text and all(written[key] == value for key, value in top.items())


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", r"line 1, column 1 is not valid JSON"),
        (b"{", r"line 1, column 2 is not valid JSON"),
        (b"[1, 2]", r"it must hold a JSON object, not \[1, 2\]"),
        (b"null", r"it must hold a JSON object, not null"),
        (b'{"vocab_size": 1, "vocab_size": 2}', r"the key 'vocab_size' is given twice"),
        (b'{"vocab_size": NaN}', r"vocab_size is nan: it must be a finite number"),
        (b'{"vocab_size": 1' + b"0" * 5000 + b"}", r"config\.json"),
        (b"\xff\xfe\x00{", r"byte 0 is not UTF-8"),
        (b'{"architectures": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", r"nested too deeply"),
        (b'{"architectures": ' + b"[" * 100 + b"]" * 100 + b"}", r"architectures is nested too deeply"),
        (b'{"model_type": "gpt2"}', r"config\.json: model_type is \"gpt2\""),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_files_that_are_wrong(tmp_path: Path, content: bytes, match: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    message = refused(tmp_path, match)
    assert str(tmp_path / "config.json") in message


def test_files_that_are_missing(tmp_path: Path) -> None:
    refused(tmp_path, r"config\.json: there is no such file")
    refused(tmp_path / "elsewhere.json", r"elsewhere\.json: there is no such file")
    (tmp_path / "config.json").mkdir()
    refused(tmp_path, r"config\.json: cannot be read: Is a directory")
    refused("a\0b", r"null")


def test_a_list_is_no_config() -> None:
    with pytest.raises(UserError, match=r"a config is a path or the parsed content of a config\.json, not a list"):
        ModelConfig.from_json([1])  # type: ignore[arg-type]


# Values that have broken readers elsewhere: wrong types, signs, sizes, and what is nearly right.
ODD = st.sampled_from(
    [None, True, False, 0, -1, 1, 2, 3, 7, 10**6, 2**31, 2**63, -(2**70), 10**400, 0.5, -0.0, 1e308, 5e-324]
    + [float("nan"), float("inf"), "", "8", "situ", "silu", "full_attention", "\ud800", "x" * 10_000]
    + [[], [[]], [1], [None], ["linear_attention"] * 9, {}, {"a": {}}, {"head_dim": 16}]
)  # fmt: skip


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a parsed file, by its path of keys and indices."""
    found = [path] if path else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found += places(value, (*path, key))
    return found


def mutate(tree: Any, draw: Any) -> None:
    """One slip: a value replaced, dropped, moved by one, or a key misspelt, doubled under another name, or moved up a level."""
    where = draw(st.sampled_from(places(tree)))
    parent = tree
    for key in where[:-1]:
        parent = parent[key]
    key = where[-1]
    action = draw(st.sampled_from(["replace", "drop", "nudge", "rename", "double", "lift"]))
    value = parent[key]
    if action == "replace":
        parent[key] = copy.deepcopy(draw(ODD))
    elif action == "drop":
        del parent[key]
    elif action == "nudge" and isinstance(value, (int, float)):
        parent[key] = value + draw(st.sampled_from([-1, 1, -2, 100]))
    elif action in ("rename", "double") and isinstance(parent, dict):
        names = [name for known in release_keys.TEXT_KEYS for name in known.spellings]
        name = draw(st.sampled_from([*names, *release_keys.STRUCTURAL, *release_keys.GUARDED, f"{key}s", str(key)[1:]]))
        parent[name] = parent.pop(key) if action == "rename" else copy.deepcopy(value)
    elif action == "lift" and isinstance(tree, dict):
        tree[str(key)] = copy.deepcopy(value)


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_mutated_files_load_or_are_refused(data: st.DataObject) -> None:
    """Whatever is done to a file: a valid config whose writing means the same, or one clear line. Never another exception."""
    sources = [raw(name) for name in MODELS] + [as_transformers_writes_it()]
    tree = data.draw(st.sampled_from(sources))
    for _ in range(data.draw(st.integers(1, 3))):
        if places(tree):
            mutate(tree, data.draw)
    try:
        config = ModelConfig.from_json(tree)
    except UserError as error:
        message = str(error)
        assert message and "\n" not in message and len(message) < 600
        return
    again = ModelConfig.from_json(config.to_json())
    assert again == config and again.to_json() == config.to_json()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.data())
def test_damaged_text_loads_or_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray((ORACLES / data.draw(st.sampled_from(MODELS)) / "model" / "config.json").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        content[start : start + data.draw(st.integers(0, 40))] = data.draw(st.binary(max_size=8))
    file = tmp_path_factory.getbasetemp() / "config.json"
    file.write_bytes(content)
    try:
        config = ModelConfig.from_json(file)
    except UserError as error:
        assert str(file) in str(error) and "\n" not in str(error)
        return
    assert ModelConfig.from_json(config.to_json()) == config
