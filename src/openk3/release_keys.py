"""Which keys a `config.json` may hold, and what the absence of each means: the vocabulary of `release_config`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Key:
    """One field of ModelConfig in a `config.json`.

    `spellings` start with the one that is written. `default` is what the release's own configuration class takes for an absent key,
    often not the released value. `null_is_default`: a null means the same as absence, though the default is not null.
    """

    field: str
    spellings: tuple[str, ...]
    default: Any
    null_is_default: bool = False


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
    Key("mla_output_gate", ("mla_use_output_gate",), False, null_is_default=True),
    Key("intermediate_size", ("intermediate_size",), 11008),
    Key("activation", ("hidden_act",), "silu"),
    Key("situ_beta", ("activation_situ_beta",), None),
    Key("situ_linear_beta", ("activation_situ_linear_beta",), None),
    Key("num_experts", ("num_experts", "num_local_experts"), None),
    Key("experts_per_token", ("num_experts_per_token", "num_experts_per_tok"), None),
    Key("num_shared_experts", ("num_shared_experts", "n_shared_experts"), 0, null_is_default=True),
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

# Inside `linear_attn_config`, and beside it in the spelling of transformers.
LINEAR_KEYS = (
    Key("kda_num_heads", ("num_heads",), None),
    Key("kda_head_dim", ("head_dim",), None),
    Key("kda_conv_size", ("short_conv_kernel_size",), None),
    Key("kda_full_rank_gate", ("use_full_rank_gate",), False),
    Key("kda_gate_lower_bound", ("gate_lower_bound",), None),
)
FLAT_LINEAR_SPELLINGS = {
    "kda_num_heads": "linear_num_heads",
    "kda_head_dim": "linear_head_dim",
    "kda_conv_size": "linear_conv_kernel_dim",
}
LAYER_LISTS = ("kda_layers", "full_attn_layers")

# Sizes that the configuration class leaves null, and that matter only where a layer uses them: (fields, used by).
MLA_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
MOE_SIZES = ("experts_per_token", "moe_intermediate_size")
KDA_SIZES = ("kda_num_heads", "kda_head_dim", "kda_conv_size")

# What only K3 has: left out of a Kimi-Linear file while they stand at their defaults.
K3_ONLY = (
    "mla_output_gate",
    "situ_beta",
    "situ_linear_beta",
    "latent_size",
    "latent_norm",
    "attn_res_block_size",
    "kda_full_rank_gate",
    "kda_gate_lower_bound",
)

# Read for what they imply, checked against the rest, never kept.
STRUCTURAL = ("model_type", "linear_attn_config", "layer_types", "mlp_layer_types", "qk_head_dim", "num_key_value_heads")
GUARDED = ("mla_use_nope", "num_nextn_predict_layers")

# What transformers writes into any configuration: defaults of generation and bookkeeping.
_TRANSFORMERS = frozenset(
    "_name_or_path architectures auto_map transformers_version dtype torch_dtype return_dict return_dict_in_generate"
    " output_hidden_states output_attentions output_scores torchscript use_bfloat16 tf_legacy_loss pruned_heads tie_encoder_decoder"
    " is_encoder_decoder is_decoder add_cross_attention cross_attention_hidden_size chunk_size_feed_forward finetuning_task id2label"
    " label2id num_labels problem_type task_specific_params tokenizer_class prefix sep_token_id decoder_start_token_id"
    " forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids remove_invalid_values do_sample"
    " early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty"
    " no_repeat_ngram_size encoder_no_repeat_ngram_size exponential_decay_length_penalty num_return_sequences max_length min_length"
    " _attn_implementation _attn_implementation_autoset _commit_hash".split()
)

# Keys of the text level that change nothing in the arithmetic. `quantization_config` says how tensors are stored; what is stored decides.
TEXT_INERT = _TRANSFORMERS | frozenset(
    "quantization_config use_cache initializer_range model_max_length rope_theta rope_scaling rope_parameters head_dim"
    " use_grouped_topk topk_method pretraining_tp attention_bias attention_dropout output_router_logits ep_size aux_loss_alpha"
    " seq_aux".split()
)

# Keys of the top level of a K3 file, beside `text_config`.
TOP_INERT = _TRANSFORMERS | frozenset(
    "quantization_config image_placeholder video_placeholder ignore_index media_placeholder_token_id vision_config use_cache"
    " initializer_range".split()
)
# These stand at both levels of a K3 file, and must agree there.
TOP_MIRRORED = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
