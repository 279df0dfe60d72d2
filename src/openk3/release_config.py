"""The release's `config.json`, in and out.

Two layouts: Kimi K3 (`model_type: kimi_k3`, the text model nested under `text_config`) and Kimi-Linear (`model_type: kimi_linear`, flat;
also as transformers writes it). Every key is a field of `ModelConfig` (some have two spellings in the wild; both given and different is
an error), or changes nothing in the text model's arithmetic (kept, and written back), or is an error that names it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from openk3 import config_rules, release_keys, strict_json
from openk3.config import ModelConfig
from openk3.config_rules import nearest
from openk3.errors import UserError
from openk3.strict_json import same, show

_ROTARY = "rotary MLA is not supported: Kimi K3 and Kimi-Linear use MLA without positions (mla_use_nope: true)"


def read(source: Mapping[str, Any] | str | Path) -> ModelConfig:
    """A `ModelConfig` from a parsed `config.json`, the path of one, or a directory that holds one.

    Raises UserError in the spelling of the file: for what cannot be read, an unknown key, a value out of range, a contradiction, and for
    what is not supported (rotary MLA, multi-token prediction, a multimodal input is simply not read).
    """
    if isinstance(source, Mapping):
        strict_json.check_tree(source)
        return _Reader(source).config()
    if not isinstance(source, (str, Path)):
        raise UserError(f"a config is a path or the parsed content of a config.json, not a {type(source).__name__}")
    path = Path(source)
    if strict_json.is_directory(path):
        path = path / "config.json"
    raw = strict_json.load_object(path)
    try:
        return _Reader(raw).config()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


class _Reader:
    """Reads one parsed `config.json`; `used` collects the keys of the text level that found a meaning."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.nested = self._is_nested()
        self.text: Mapping[str, Any] = raw["text_config"] if self.nested else raw
        self.prefix = "text_config." if self.nested else ""
        self.names: dict[str, str] = {"family": "model_type"}
        self.used: set[str] = set(release_keys.STRUCTURAL) | set(release_keys.GUARDED)

    def fail(self, key: str, rule: str) -> NoReturn:
        raise UserError(f"{self.prefix}{key} {rule}")

    def config(self) -> ModelConfig:
        fields: dict[str, Any] = {"family": "kimi_k3" if self.nested else "kimi_linear"}
        for key in release_keys.TEXT_KEYS:
            fields[key.field] = self._value(key, self.text, self.prefix)
        # Layers must be counted before anything enumerates them.
        config_rules.Rules(fields, self._spell).whole("num_layers", 1, config_rules.MOST_LAYERS)
        linear = self._linear_attention(fields)
        fields["mla_layers"] = self._mla_layers(linear, fields["num_layers"])
        self._moe_layers(fields)
        self._defaults(fields)
        self._guard(fields)
        kept = {"text": self._kept_text()}
        if self.nested:
            kept["top"] = self._kept_top(fields)
        config_rules.check(fields, self._spell)
        self._heads(fields)
        return ModelConfig(**fields, passthrough=kept)

    def _is_nested(self) -> bool:
        kind, nested = self.raw.get("model_type"), "text_config" in self.raw
        if kind is not None and kind not in config_rules.FAMILIES:
            raise UserError(f"model_type is {show(kind)}: openk3 reads {' and '.join(config_rules.FAMILIES)}")
        if kind == "kimi_k3" and not nested:
            raise UserError("model_type is kimi_k3, but there is no text_config")
        if kind == "kimi_linear" and nested:
            raise UserError("model_type is kimi_linear, which is flat, but there is a text_config")
        if nested:
            text = self.raw["text_config"]
            if not isinstance(text, Mapping):
                raise UserError(f"text_config is {show(text)}: it must be an object")
            if text.get("model_type", "kimi_linear") != "kimi_linear":
                raise UserError(f"text_config.model_type is {show(text['model_type'])}: the text model of kimi_k3 is kimi_linear")
        return nested

    def _spell(self, field: str) -> str:
        return self.names.get(field, field)

    def _value(self, key: release_keys.Key, level: Mapping[str, Any], prefix: str) -> Any:
        """The value of a field, from whichever spelling is there, remembering the spelling for messages."""
        found = [spelling for spelling in key.spellings if spelling in level]
        if level is self.text:
            self.used.update(found)
        self.names[key.field] = prefix + (found or key.spellings)[0]
        for other in found[1:]:
            if not same(level[other], level[found[0]]):
                raise UserError(
                    f"{prefix}{found[0]} is {show(level[found[0]])}, but {prefix}{other}, another spelling of it, is {show(level[other])}"
                )
        if not found or (level[found[0]] is None and key.null_is_default):
            return key.default
        return level[found[0]]

    def _linear_attention(self, fields: dict[str, Any]) -> Mapping[str, Any]:
        """Reads `linear_attn_config` and transformers' flat spelling of it into `fields`; returns the object, `{}` when there is none."""
        linear = self.text.get("linear_attn_config")
        if linear is not None and not isinstance(linear, Mapping):
            self.fail("linear_attn_config", f"is {show(linear)}: it must be an object or null")
        linear = linear or {}
        prefix = f"{self.prefix}linear_attn_config."
        known = [spelling for key in release_keys.LINEAR_KEYS for spelling in key.spellings] + list(release_keys.LAYER_LISTS)
        for name in linear:
            if name not in known:
                raise UserError(f"{prefix}{name} is not a known key{nearest(name, known)}")
        for key in release_keys.LINEAR_KEYS:
            value = self._value(key, linear, prefix)
            flat = release_keys.FLAT_LINEAR_SPELLINGS.get(key.field)
            if flat is not None and flat in self.text:
                self.used.add(flat)
                if value is not None and not same(value, self.text[flat]):
                    self.fail(flat, f"is {show(self.text[flat])}, but {self.names[key.field]}, another spelling of it, is {show(value)}")
                if value is None:
                    self.names[key.field] = self.prefix + flat
                value = self.text[flat]
            fields[key.field] = value
        return linear

    def _mla_layers(self, linear: Mapping[str, Any], layers: int) -> tuple[int, ...]:
        """The layers that are MLA, counted from 0, from the two 1-based lists, from `layer_types`, or from both, which must agree."""
        lists = {name: self._layer_list(linear, name, layers) for name in release_keys.LAYER_LISTS}
        kda, full = lists["kda_layers"], lists["full_attn_layers"]
        types = self._layer_types(layers)
        everything = set(range(1, layers + 1))
        if kda is not None and full is not None:
            for wrong, what in ((kda & full, "is in both"), (everything - kda - full, "is in neither")):
                if wrong:
                    where = f"{self.prefix}linear_attn_config.kda_layers and full_attn_layers"
                    raise UserError(f"layer {min(wrong)} {what} of {where} (counted from 1): each layer is one of the two")
        if full is None and kda is not None:
            full = everything - kda
        if full is not None and types is not None and full != types:
            layer = min(full ^ types)
            self.fail("layer_types", f"and linear_attn_config disagree about layer {layer} (counted from 1)")
        if full is None:
            full = types
        if full is None:
            if linear or any(flat in self.text for flat in release_keys.FLAT_LINEAR_SPELLINGS.values()):
                self.fail("linear_attn_config", "has neither kda_layers nor full_attn_layers, so which layers are KDA is not known")
            # The release's class without a linear_attn_config has no KDA layer.
            full = everything
        return tuple(sorted(layer - 1 for layer in full))

    def _layer_list(self, linear: Mapping[str, Any], name: str, layers: int) -> set[int] | None:
        value = linear.get(name)
        if value is None:
            return None
        key = f"linear_attn_config.{name}"
        if not isinstance(value, (list, tuple)) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
            self.fail(key, f"is {show(value)}: it must be a list of layers, counted from 1")
        for layer in value:
            if not 1 <= layer <= layers:
                self.fail(key, f"names layer {show(layer)}: layers count from 1 to {layers} ({self._spell('num_layers')})")
        if len(set(value)) != len(value):
            self.fail(key, f"names a layer twice: {show(value)}")
        return set(value)

    def _kinds(self, name: str, kinds: tuple[str, str], layers: int) -> set[int] | None:
        """The layers (from 1) that a list such as `layer_types` marks with the first of two kinds."""
        value = self.text.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or len(value) != layers:
            self.fail(name, f"must be a list of {layers} strings, one a layer")
        for kind in value:
            if kind not in kinds:
                self.fail(name, f"holds {show(kind)}: each layer is one of {' and '.join(kinds)}")
        return {layer + 1 for layer, kind in enumerate(value) if kind == kinds[0]}

    def _layer_types(self, layers: int) -> set[int] | None:
        return self._kinds("layer_types", ("full_attention", "linear_attention"), layers)

    def _moe_layers(self, fields: dict[str, Any]) -> None:
        """transformers' `mlp_layer_types` says what `first_k_dense_replace` and `moe_layer_freq` say; it stands in for the first."""
        sparse = self._kinds("mlp_layer_types", ("sparse", "dense"), fields["num_layers"])
        if sparse is None:
            return
        rules = config_rules.Rules(fields, self._spell)
        rules.whole("first_dense_layers", 0)
        rules.whole("moe_layer_freq", 1)
        if "first_k_dense_replace" not in self.text:
            fields["first_dense_layers"] = min(sparse, default=fields["num_layers"] + 1) - 1
        first, every = fields["first_dense_layers"], fields["moe_layer_freq"]
        implied = {layer + 1 for layer in range(first, fields["num_layers"]) if layer % every == 0}
        if sparse != implied:
            where = f"{self._spell('first_dense_layers')}={first} and {self._spell('moe_layer_freq')}={every}"
            self.fail("mlp_layer_types", f"disagrees with {where} about layer {min(sparse ^ implied)} (counted from 1)")

    def _defaults(self, fields: dict[str, Any]) -> None:
        """Sizes left null: 0 where no layer uses them, an error where one does. And a beta of 0, which the release reads as not given."""
        layers, mla = fields["num_layers"], len(fields["mla_layers"])
        for names, needed in (
            (release_keys.MLA_SIZES, f"{mla} layers are MLA" if mla else ""),
            (release_keys.KDA_SIZES, f"{layers - mla} layers are KDA" if mla < layers else ""),
            (release_keys.MOE_SIZES, f"there are experts ({self._spell('num_experts')})" if fields["num_experts"] is not None else ""),
        ):
            for name in names:
                if fields[name] is None:
                    if needed:
                        raise UserError(f"{self._spell(name)} is not given, but {needed}")
                    fields[name] = 0
        if fields["situ_beta"] == 0 and not isinstance(fields["situ_beta"], bool):
            fields["situ_beta"] = None
        if "max_position_embeddings" not in self.text and "model_max_length" in self.text:
            self.names["max_position_embeddings"] = f"{self.prefix}model_max_length"
            fields["max_position_embeddings"] = self.text["model_max_length"]

    def _guard(self, fields: dict[str, Any]) -> None:
        """What openk3 does not do is refused here, not ignored."""
        drafts = self.text.get("num_nextn_predict_layers", 0)
        if drafts is not None and (isinstance(drafts, bool) or not isinstance(drafts, int) or drafts < 0):
            self.fail("num_nextn_predict_layers", f"is {show(drafts)}: it must be a whole number, 0 or more")
        if drafts:
            self.fail("num_nextn_predict_layers", f"is {drafts}: multi-token prediction is not supported; the released models have 0")
        nope = self.text.get("mla_use_nope")
        if nope is not None and not isinstance(nope, bool):
            self.fail("mla_use_nope", f"is {show(nope)}: it must be true or false")
        if nope is None and "layer_types" in self.text:
            nope = True  # transformers' own class has no rotary form, and does not write the key
        if not nope and fields["mla_layers"] and fields["qk_rope_head_dim"] != 0:
            given = "is false" if "mla_use_nope" in self.text else "is absent, which means false"
            self.fail("mla_use_nope", f"{given}, and {self._spell('qk_rope_head_dim')} is {show(fields['qk_rope_head_dim'])}: {_ROTARY}")

    def _heads(self, fields: dict[str, Any]) -> None:
        heads = self.text.get("num_key_value_heads")
        if heads is not None and not same(heads, fields["num_heads"]):
            self.fail("num_key_value_heads", f"is {show(heads)}, but {self._spell('num_heads')} is {fields['num_heads']}: MLA has as many")
        width, sum_ = self.text.get("qk_head_dim"), fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
        if width is not None and not same(width, sum_):
            self.fail("qk_head_dim", f"is {show(width)}, but qk_nope_head_dim + qk_rope_head_dim is {sum_}")

    def _kept_text(self) -> dict[str, Any]:
        rest = {key: value for key, value in self.text.items() if key not in self.used}
        inert = release_keys.TEXT_INERT | (frozenset() if self.nested else {"vision_config"})
        if not self.nested and rest.get("vision_config") is not None:
            self.fail("vision_config", "is given, but a kimi_linear model is text only")
        self._refuse_unknown(rest, inert, self.prefix, self._text_names())
        return rest

    def _kept_top(self, fields: dict[str, Any]) -> dict[str, Any]:
        top = {key: value for key, value in self.raw.items() if key not in ("model_type", "text_config")}
        known = set(release_keys.TOP_INERT) | set(release_keys.TOP_MIRRORED)
        for key in top:
            if key not in known and key in self._text_names():
                raise UserError(f"{key} is at the top level: it belongs inside text_config")
        self._refuse_unknown(top, known, "", known | {"text_config", "model_type"})
        for key in release_keys.TOP_MIRRORED:
            if key not in top:
                continue
            if key in self.text:
                if not same(top.pop(key), self.text[key]):
                    raise UserError(f"{key} is {show(self.raw[key])}, but text_config.{key} is {show(self.text[key])}: they must agree")
            else:
                fields[key] = top.pop(key)
                self.names[key] = key
        return top

    def _text_names(self) -> set[str]:
        spelled = {spelling for key in release_keys.TEXT_KEYS for spelling in key.spellings}
        others = (*release_keys.STRUCTURAL, *release_keys.GUARDED, *release_keys.FLAT_LINEAR_SPELLINGS.values())
        return spelled | set(others) | release_keys.TEXT_INERT

    @staticmethod
    def _refuse_unknown(keys: Iterable[str], allowed: Iterable[str], prefix: str, known: Iterable[str]) -> None:
        for key in keys:
            if key not in allowed:
                raise UserError(f"{prefix}{key} is not a known key{nearest(key, sorted(known))}")


def write(config: ModelConfig, *, dtype: str | None = None) -> dict[str, Any]:
    """The `config.json` of `config`, in the layout of its family, with the inert keys that it was read with.

    `dtype` states the dtype of the weights beside it, at each level; None leaves what was read. The two names of the dtype key
    (`dtype`, and `torch_dtype` of older files) are both honoured.
    """
    text = copy.deepcopy(dict(config.passthrough.get("text", {})))
    text.setdefault("architectures", ["KimiLinearForCausalLM"])
    text["model_type"] = "kimi_linear"
    flat = config.family == "kimi_linear"
    idle = _idle_sizes(config)
    for key in release_keys.TEXT_KEYS:
        value = getattr(config, key.field)
        if flat and key.field in release_keys.K3_ONLY and value == key.default:
            continue
        text[key.spellings[0]] = None if key.field in idle and value == 0 else value
    if flat and "model_max_length" in text:
        # Kimi-Linear's files name the context length so, and only so.
        text["model_max_length"] = text.pop("max_position_embeddings")
    text["num_key_value_heads"] = config.num_heads
    text["mla_use_nope"] = True
    text["num_nextn_predict_layers"] = 0
    text["linear_attn_config"] = _linear_attn_config(config, flat)
    _state_dtype(text, dtype)
    if flat:
        return text
    top = copy.deepcopy(dict(config.passthrough.get("top", {})))
    top.setdefault("architectures", ["KimiK3ForConditionalGeneration"])
    top["model_type"] = "kimi_k3"
    for name in release_keys.TOP_MIRRORED:
        top[name] = text[name]
    _state_dtype(top, dtype)
    top["text_config"] = text
    return top


def _idle_sizes(config: ModelConfig) -> tuple[str, ...]:
    """Fields that no layer uses, where the release's class says null and ModelConfig 0."""
    mla = () if config.mla_layers else release_keys.MLA_SIZES
    return (*mla, *(release_keys.MOE_SIZES if config.num_experts is None else ()))


def _linear_attn_config(config: ModelConfig, flat: bool) -> dict[str, Any] | None:
    values = {key.spellings[0]: getattr(config, key.field) for key in release_keys.LINEAR_KEYS}
    if not config.kda_layers and not any(values.values()):
        return None
    for key in release_keys.LINEAR_KEYS:
        if flat and key.field in release_keys.K3_ONLY and values[key.spellings[0]] == key.default:
            del values[key.spellings[0]]
    layers = {"kda_layers": [i + 1 for i in config.kda_layers], "full_attn_layers": [i + 1 for i in config.mla_layers]}
    return {**layers, **values}


def _state_dtype(level: dict[str, Any], dtype: str | None) -> None:
    if dtype is not None:
        level["torch_dtype" if "torch_dtype" in level and "dtype" not in level else "dtype"] = dtype
