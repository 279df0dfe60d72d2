"""The quantization block of a config.json, as compressed-tensors understands it: what is packed, and how experts read their inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from openk3.config import ModelConfig
from openk3.errors import UserError
from openk3.ops.experts import ExpertInputs
from openk3.ops.mx import BLOCK, ScaleRule

KEY = "quantization_config"
FORMAT = "mxfp4-pack-quantized"

IGNORED = (
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    r"re:.*block_sparse_moe\.gate.*",
    "re:.*routed_expert_(down|up)_proj.*",
    "re:.*res_proj.*",
    "re:.*lm_head.*",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
)
"""Every linear layer that stays plain. The release's own list leaves out latent projections and residual queries, which are plain in
its files all the same."""


def block(inputs: ExpertInputs, *, trained_under: ScaleRule | None = None) -> dict[str, Any]:
    """The block for routed experts in MXFP4 that read their inputs in `inputs`.

    `trained_under` is for plain master weights that training sees rounded by that scale rule: status "frozen" instead of "compressed".
    """
    activations = {
        "num_bits": 8, "type": "float", "strategy": "group", "group_size": BLOCK, "symmetric": True, "dynamic": True,
        "scale_dtype": "torch.uint8",
    }  # fmt: skip
    weights = {
        "num_bits": 4, "type": "float", "strategy": "group", "group_size": BLOCK, "symmetric": True, "dynamic": False,
        "scale_dtype": "torch.uint8",
    }  # fmt: skip
    group = {
        "targets": ["Linear"],
        "format": FORMAT,
        "weights": weights,
        "input_activations": activations if inputs == "mxfp8" else None,
        "output_activations": None,
    }
    status = (
        {"quantization_status": "compressed"} if trained_under is None else {"quantization_status": "frozen", "scale_rule": trained_under}
    )
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        **status,
        "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
        "ignore": list(IGNORED),
    }


def stated(config: ModelConfig) -> Mapping[str, Any] | None:
    """The quantization block that the config was read with, at the text level or at the top; None without one."""
    for level in ("text", "top"):
        found = config.passthrough.get(level, {}).get(KEY)
        if found is not None:
            if not isinstance(found, Mapping):
                raise UserError(f"{KEY} is an object, not {type(found).__name__}")
            return found
    return None


def with_block(config: ModelConfig, found: Mapping[str, Any] | None) -> ModelConfig:
    """The config with another quantization block at the text level; None takes every block away."""
    kept = {level: {key: value for key, value in keys.items() if key != KEY} for level, keys in config.passthrough.items()}
    if found is not None:
        kept.setdefault("text", {})[KEY] = found
    return config.replace(passthrough=kept)


def expert_inputs_of(config: ModelConfig) -> ExpertInputs:
    """How the config says that routed experts read their inputs: "none" unless a group states 8-bit floats in blocks of 32.

    Raises UserError for an activation scheme that openk3 does not compute: it would be served other arithmetic than it was made for.
    """
    found = stated(config)
    groups = (found or {}).get("config_groups") or {}
    schemes = [group.get("input_activations") for group in groups.values() if isinstance(group, Mapping)]
    wanted = [scheme for scheme in schemes if scheme is not None]
    if not wanted:
        return "none"
    for scheme in wanted:
        fits = isinstance(scheme, Mapping) and (scheme.get("num_bits"), scheme.get("type"), scheme.get("group_size")) == (8, "float", BLOCK)
        if not fits:
            raise UserError(f'{KEY}: input_activations {scheme!r:.120} is not MXFP8; pass expert_activations="none" or "mxfp8" to choose')
    return "mxfp8"


def scale_rule_of(config: ModelConfig) -> ScaleRule | None:
    """The rule by which training sees the plain expert weights rounded; None where they are used as they are.

    Raises UserError for a rule that openk3 does not know.
    """
    found = stated(config) or {}
    if found.get("quantization_status") != "frozen":
        return None
    rule = found.get("scale_rule", "even")
    if rule not in ("even", "floor", "ceil"):
        raise UserError(f"{KEY}: the scale rule {rule!r} is not even, floor or ceil")
    return rule
