"""What makes a configuration valid: one rule a line, each error naming the field, its value and the rule.

`ModelConfig` runs these on itself; the reader of `config.json` runs them with the spelling of the file, so that the message names the
key that the reader of the message can see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from openk3.errors import UserError
from openk3.strict_json import show

FAMILIES = ("kimi_k3", "kimi_linear")
ACTIVATIONS = ("situ", "silu")
ROUTER_ACTIVATIONS = ("sigmoid", "softmax")

# A size above these is a slip of the pen, and would exhaust memory in Python lists long before a tensor refuses it.
LARGEST_SIZE = 2**31 - 1
MOST_LAYERS = 10_000
MOST_EXPERTS = 1_000_000

Spelling = Callable[[str], str]


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest known one, when one is close."""
    import difflib  # only a message needs it, and every start of the command line would pay for it

    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


class Rules:
    """Checks fields by name and raises UserError in the spelling of the source they came from."""

    def __init__(self, fields: Mapping[str, Any], spelling: Spelling) -> None:
        self.fields = fields
        self.spelling = spelling

    def fail(self, field: str, rule: str) -> NoReturn:
        """Raise the UserError for `field`."""
        raise UserError(f"{self.spelling(field)} is {show(self.fields[field])}: {rule}")

    def whole(self, field: str, least: int, most: int = LARGEST_SIZE, *, optional: bool = False) -> None:
        """An int (never a bool) from `least` to `most`; None too when optional."""
        value = self.fields[field]
        if value is None and optional:
            return
        or_null = " or null" if optional else ""
        if isinstance(value, bool) or not isinstance(value, int):
            self.fail(field, f"it must be a whole number{or_null}")
        if not least <= value <= most:
            self.fail(field, f"it must be from {least} to {most}{or_null}")

    def real(self, field: str, accept: Callable[[float], bool], rule: str, *, optional: bool = False) -> None:
        """A finite number that `accept` takes; None too when optional."""
        value = self.fields[field]
        if value is None and optional:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(field, "it must be a number" + (" or null" if optional else ""))
        # An int too large for a float is as good as infinite here.
        if not abs(value) <= 1e308 or not math.isfinite(value) or not accept(float(value)):
            self.fail(field, rule)

    def flag(self, field: str) -> None:
        """True or False, nothing that merely behaves like it."""
        if not isinstance(self.fields[field], bool):
            self.fail(field, "it must be true or false")

    def choice(self, field: str, options: tuple[str, ...]) -> None:
        """One of the strings `options`."""
        if self.fields[field] not in options or not isinstance(self.fields[field], str):
            self.fail(field, f"it must be one of {', '.join(options)}")


def _positive(value: float) -> bool:
    return value > 0


def check(fields: Mapping[str, Any], spelling: Spelling = str) -> None:
    """Raise UserError for the first rule that `fields` (the fields of ModelConfig by name) breaks.

    `spelling` turns a field's name into the name that the message should use.
    """
    rules = Rules(fields, spelling)
    rules.choice("family", FAMILIES)
    for field in ("vocab_size", "hidden_size", "num_heads", "intermediate_size", "max_position_embeddings"):
        rules.whole(field, 1)
    rules.whole("num_layers", 1, MOST_LAYERS)
    rules.flag("tie_word_embeddings")
    rules.real("rms_norm_eps", lambda eps: 0 < eps < 1, "it must be above 0 and below 1")
    rules.whole("attn_res_block_size", 1, optional=True)
    _check_token_ids(rules)
    _check_layers(rules)
    _check_mla(rules)
    _check_kda(rules)
    _check_activation(rules)
    _check_moe(rules)


def _check_token_ids(rules: Rules) -> None:
    for field in ("bos_token_id", "eos_token_id", "pad_token_id"):
        rules.whole(field, 0, optional=True)
        value = rules.fields[field]
        if value is not None and value >= rules.fields["vocab_size"]:
            rules.fail(field, f"it must be below {rules.spelling('vocab_size')}={rules.fields['vocab_size']}, or null")


def _check_layers(rules: Rules) -> None:
    layers, count = rules.fields["mla_layers"], rules.fields["num_layers"]
    if not isinstance(layers, tuple) or any(isinstance(i, bool) or not isinstance(i, int) for i in layers):
        rules.fail("mla_layers", "it must be a sequence of whole numbers")
    if list(layers) != sorted(set(layers)):
        rules.fail("mla_layers", "each layer once, in increasing order")
    if layers and not 0 <= layers[0] <= layers[-1] < count:
        rules.fail("mla_layers", f"each must be a layer of the {count} ({rules.spelling('num_layers')}), counted from 0")


def _check_mla(rules: Rules) -> None:
    # Without a layer of the kind its sizes say nothing, so 0 is allowed there: an ablation need not clear them.
    least = 1 if rules.fields["mla_layers"] else 0
    rules.whole("q_lora_rank", 1, optional=True)
    rules.whole("kv_lora_rank", least)
    rules.whole("qk_nope_head_dim", 0)
    rules.whole("qk_rope_head_dim", 0)
    rules.whole("v_head_dim", least)
    rules.flag("mla_output_gate")
    if least and rules.fields["qk_nope_head_dim"] + rules.fields["qk_rope_head_dim"] == 0:
        rules.fail("qk_nope_head_dim", f"it and {rules.spelling('qk_rope_head_dim')} are both 0, so MLA has no keys to compare")


def _check_kda(rules: Rules) -> None:
    least = 1 if len(rules.fields["mla_layers"]) < rules.fields["num_layers"] else 0
    rules.whole("kda_num_heads", least)
    rules.whole("kda_head_dim", least)
    rules.whole("kda_conv_size", least)
    rules.flag("kda_full_rank_gate")
    rules.real(
        "kda_gate_lower_bound", lambda bound: bound < 0, "the log decay's lower bound must be below 0, or null for softplus", optional=True
    )


def _check_activation(rules: Rules) -> None:
    rules.choice("activation", ACTIVATIONS)
    rules.real("situ_beta", _positive, "it must be above 0, or null for 1", optional=True)
    rules.real("situ_linear_beta", _positive, "it must be above 0, or null to leave the up branch as it is", optional=True)


def _check_moe(rules: Rules) -> None:
    fields = rules.fields
    rules.whole("num_experts", 1, MOST_EXPERTS, optional=True)
    experts = fields["num_experts"]
    least = 0 if experts is None else 1
    rules.whole("experts_per_token", least)
    rules.whole("num_shared_experts", 0)
    rules.whole("moe_intermediate_size", least)
    rules.whole("first_dense_layers", 0)
    rules.whole("moe_layer_freq", 1)
    rules.whole("latent_size", 1, optional=True)
    rules.flag("latent_norm")
    rules.choice("router_activation", ROUTER_ACTIVATIONS)
    rules.flag("renormalize")
    rules.real("routed_scaling_factor", _positive, "it must be above 0")
    rules.whole("num_expert_groups", 1)
    rules.whole("topk_groups", 1)
    if experts is None:
        return
    top_k, groups, kept = fields["experts_per_token"], fields["num_expert_groups"], fields["topk_groups"]
    if top_k > experts:
        rules.fail("experts_per_token", f"a token cannot go to more experts than the {experts} there are ({rules.spelling('num_experts')})")
    if kept > groups:
        rules.fail("topk_groups", f"more groups kept than the {groups} there are ({rules.spelling('num_expert_groups')})")
    if experts % groups:
        rules.fail("num_expert_groups", f"it must divide {rules.spelling('num_experts')}={experts}")
    if kept < groups:
        if experts // groups < 2:
            rules.fail("num_expert_groups", "a group is ranked by its two best experts, so it needs at least two")
        if top_k > kept * (experts // groups):
            rules.fail("experts_per_token", f"the {kept} kept groups hold only {kept * (experts // groups)} experts")
