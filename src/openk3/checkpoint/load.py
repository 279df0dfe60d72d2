"""From files to a model: the release layout as it lies on disk, or a run directory of openk3."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openk3.checkpoint.names import Entry, Part, entries
from openk3.checkpoint.quantization import expert_inputs_of, scale_rule_of
from openk3.checkpoint.shards import DTYPES, Shards, first_of
from openk3.checkpoint.verify import PACKED, SCALE, Match, match
from openk3.config import ModelConfig
from openk3.errors import UserError
from openk3.model.decoder import Decoder
from openk3.model.moe import Experts, LatentMoE
from openk3.model.packed_experts import PackedExperts
from openk3.ops.experts import ExpertInputs
from openk3.ops.mx import MXTensor

CHECKPOINTS = "checkpoints"
_STEP = re.compile(r"step-(\d+)")


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    config: ModelConfig | Mapping[str, Any] | str | Path | None = None,
    allow_unused: bool = False,
    expert_activations: ExpertInputs | None = None,
) -> Decoder:
    """The model at `path`, in eval mode: a directory in the release layout, or a run directory (its newest checkpoint).

    `dtype` None keeps the stored one; parameters that must be fp32 stay so, and are float64 in a float64 model. Packed experts stay packed.
    `config` (a ModelConfig, the content of a config.json, or a path to one) overrides the one beside the weights. Tensors that the
    model does not use are an error unless `allow_unused`; vision tensors are passed by. `expert_activations` "mxfp8" or "none" says in
    what format routed experts read their inputs; None obeys the checkpoint.

    Raises UserError when files are missing, damaged, or do not fit the config: the message names the tensor.
    """
    if not isinstance(path, (str, Path)):
        raise UserError(f"a checkpoint is named by its path, not by {type(path).__name__}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UserError(f"a model is loaded in a floating-point dtype such as torch.float32, not {dtype!r}")
    directory = locate(path)
    source = directory / "config.json" if config is None else config
    settings = source if isinstance(source, ModelConfig) else ModelConfig.from_json(source)
    if expert_activations not in (None, "none", "mxfp8"):
        raise UserError(f'expert_activations is "mxfp8" or "none", not {expert_activations!r}')
    shards = Shards.at(directory)
    found = match(settings, shards.tensors)
    if found.problems:
        raise UserError(f"{directory}: {first_of(found.problems)}")
    if found.unused and not allow_unused:
        more = f" and {len(found.unused) - 1} more" if len(found.unused) > 1 else ""
        raise UserError(f"{directory}: the model does not use {found.unused[0]}{more}; pass allow_unused=True if that is meant")
    inputs = expert_activations or expert_inputs_of(settings)
    model = empty_decoder(settings, dtype or DTYPES[found.trunk_dtype or "F32"], device, packed=found.packed, inputs=inputs)
    fill(model, shards, found)
    return model.eval()


def empty_decoder(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    packed: set[str] | frozenset[str] = frozenset(),
    inputs: ExpertInputs = "none",
) -> Decoder:
    """A decoder whose weights are allocated but not filled; `packed` names the expert parameters that are held in 4 bits."""
    with torch.device("meta"):
        model = Decoder(config)
        for index, layer in enumerate(model.layers):
            moe = layer.mlp
            if not isinstance(moe, LatentMoE):
                continue
            if f"layers.{index}.mlp.experts.w13" in packed:
                assert config.num_experts is not None
                moe.experts = PackedExperts(
                    config.num_experts, config.expert_width, config.moe_intermediate_size, moe.experts.activation, inputs
                )
            moe.experts.inputs = inputs
            if isinstance(moe.experts, Experts):
                moe.experts.weight_rule = scale_rule_of(config)
    model = model.to(dtype).to_empty(device=device)
    if config.tie_word_embeddings:
        model.head.weight = model.embed.weight
    return model


def locate(path: str | Path) -> Path:
    """The checkpoint directory that `path` means: itself, or the newest complete checkpoint of a run directory.

    Raises UserError when there is none.
    """
    directory = Path(path).expanduser()
    if not directory.exists():
        raise UserError(f"{directory} does not exist: give a checkpoint directory or a run directory")
    if directory.is_file():
        raise UserError(f"{directory} is a file: give the directory that holds config.json and the weights")
    found = checkpoints_of(directory)
    if found:
        return found[-1]
    if (directory / CHECKPOINTS).is_dir():
        raise UserError(f"{directory} is a run without a complete checkpoint (yet)")
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} has no config.json: it is neither a checkpoint nor a run directory")
    return directory


def checkpoints_of(run: Path) -> list[Path]:
    """The complete checkpoints of a run directory, oldest first. Half-written ones carry another name and are passed by."""
    steps = [(int(found[1]), entry) for entry in (run / CHECKPOINTS).glob("step-*") if (found := _STEP.fullmatch(entry.name))]
    return [entry for _, entry in sorted(steps) if (entry / "config.json").is_file()]


@torch.no_grad()
def fill(model: Decoder, shards: Shards, found: Match) -> None:
    """Copy every tensor of the release layout into its place, one at a time.

    Raises UserError for values that contradict the config: a tail of `A_log` that is not padding, a tied head that differs.
    """
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for entry in entries(model.config):
        if entry.ours in found.packed:
            _fill_packed(entry, own, shards, found)
            continue
        target = own[entry.ours]
        for part in entry.parts:
            value = shards.read(found.names[part.name])
            if entry.ours.endswith(".A_log"):
                value = _heads_of(value, target.numel(), found.names[part.name])
            place = _at(target, part)
            place.copy_(value.reshape(place.shape))
    head = found.names.get("lm_head.weight")
    if model.config.tie_word_embeddings and head is not None:
        embedding = shards.read(found.names["embed_tokens.weight"])
        if not torch.equal(shards.read(head), embedding):
            raise UserError(f"the config ties the head to the embedding, but {head} is stored and differs from it")


def _fill_packed(entry: Entry, own: Mapping[str, Tensor], shards: Shards, found: Match) -> None:
    for suffix in (PACKED, SCALE):
        target = own[entry.ours + suffix]
        for part in entry.parts:
            value = shards.read(found.names[part.name + suffix])
            _at(target, part).copy_(value if value.dtype == torch.uint8 else value.view(torch.uint8))


def _at(target: Tensor, part: Part) -> Tensor:
    return target[part.place] if part.place else target


def _heads_of(value: Tensor, heads: int, name: str) -> Tensor:
    """The first `heads` of a vector that K3 pads with zeros; a tail that is not zero means a head count that is wrong."""
    flat = value.flatten()
    if bool(flat[heads:].any()):
        raise UserError(f"tensor {name} has values after the {heads} heads of the config, where zero padding belongs")
    return flat[:heads]


@torch.no_grad()
def unpack_experts(model: Decoder) -> Decoder:
    """`model` with packed experts replaced by plain ones of the same values, one layer at a time, so that they can be trained.

    What they compute with is what the config says: rounded again by a scale rule, or as they are.
    """
    for layer in model.layers:
        moe = layer.mlp
        if not isinstance(moe, LatentMoE) or not isinstance(moe.experts, PackedExperts):
            continue
        packed = moe.experts
        count, double_width = packed.w13_packed.shape[:2]
        plain = Experts(count, packed.w13_packed.shape[2] * 2, double_width // 2, packed.activation).to(model.device)
        for name in ("w13", "w2"):
            codes, scale = getattr(packed, f"{name}_packed"), getattr(packed, f"{name}_scale")
            value = MXTensor("mxfp4", codes, scale, codes.shape[-1] * 2).dequantize(model.dtype)
            setattr(plain, name, torch.nn.Parameter(value))
        plain.inputs, plain.weight_rule = packed.inputs, scale_rule_of(model.config)
        moe.experts = plain
    return model
