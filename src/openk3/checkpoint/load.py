"""From files to a model: the release layout as it lies on disk, or a run directory of openk3."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openk3.checkpoint.names import Part, canonical, entries, is_vision
from openk3.checkpoint.shards import DTYPES, Shards
from openk3.config import ModelConfig
from openk3.errors import UserError
from openk3.model.decoder import Decoder

CHECKPOINTS = "checkpoints"
_STEP = re.compile(r"step-(\d+)")


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    config: ModelConfig | Mapping[str, Any] | str | Path | None = None,
    allow_unused: bool = False,
) -> Decoder:
    """The model at `path`, in eval mode: a directory in the release layout, or a run directory (its newest checkpoint).

    `dtype` None keeps the stored one; parameters that must be fp32 stay so, and are float64 in a float64 model. `config` (a ModelConfig,
    the content of a config.json, or a path to one) overrides the one beside the weights. Tensors that the model does not use are an
    error unless `allow_unused`; vision tensors are passed by.

    Raises UserError when files are missing, damaged, or do not fit the config: the message names the tensor.
    """
    directory = locate(path)
    source = directory / "config.json" if config is None else config
    settings = source if isinstance(source, ModelConfig) else ModelConfig.from_json(source)
    shards = Shards.at(directory)
    if dtype is not None and not dtype.is_floating_point:
        raise UserError(f"a model is loaded in a floating-point dtype, not {dtype}")
    by_name = _canonical_names(shards, directory)
    placed = _place(settings, shards, by_name, directory)
    _check_leftovers(settings, shards, by_name, placed, directory, allow_unused)
    stored = shards.tensors[by_name["embed_tokens.weight"]].dtype
    model = empty_decoder(settings, dtype or DTYPES[stored], device)
    fill(model, shards, by_name)
    return model.eval()


def empty_decoder(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """A decoder whose weights are allocated but not filled."""
    with torch.device("meta"):
        model = Decoder(config)
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
    if (directory / CHECKPOINTS).is_dir() and not (directory / "config.json").exists():
        raise UserError(f"{directory} is a run without a checkpoint yet")
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} has no config.json: it is neither a checkpoint nor a run directory")
    return directory


def checkpoints_of(run: Path) -> list[Path]:
    """The complete checkpoints of a run directory, oldest first. Half-written ones carry another name and are passed by."""
    steps = [(int(match[1]), entry) for entry in (run / CHECKPOINTS).glob("step-*") if (match := _STEP.fullmatch(entry.name))]
    return [entry for _, entry in sorted(steps) if (entry / "config.json").is_file()]


@torch.no_grad()
def fill(model: Decoder, shards: Shards, by_name: Mapping[str, str]) -> None:
    """Copy every tensor of the release layout into its place, one at a time."""
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for entry in entries(model.config):
        target = own[entry.ours]
        for part in entry.parts:
            value = shards.read(_find(part, by_name))
            if entry.ours.endswith(".A_log"):
                value = value.flatten()[: target.numel()]
            place: Tensor = target[part.place] if part.place else target
            place.copy_(value.reshape(place.shape))


def _canonical_names(shards: Shards, directory: Path) -> dict[str, str]:
    names: dict[str, str] = {}
    for name in shards.tensors:
        short = canonical(name)
        if short in names:
            raise UserError(f"{directory} holds {short} twice, as {names[short]} and as {name}")
        names[short] = name
    return names


def _find(part: Part, by_name: Mapping[str, str]) -> str:
    for name in (part.name, *part.aliases):
        if name in by_name:
            return by_name[name]
    raise KeyError(part.name)


def _place(config: ModelConfig, shards: Shards, by_name: Mapping[str, str], directory: Path) -> set[str]:
    """Check that every tensor the model needs is there in the right shape and a usable dtype; returns the file names used."""
    used: set[str] = set()
    for entry in entries(config):
        for part in entry.parts:
            try:
                name = _find(part, by_name)
            except KeyError:
                packed = part.name.removesuffix("weight") + "weight_packed"
                if packed in by_name:
                    raise UserError(f"{directory}: {by_name[packed]} is packed in 4 bits, which this version does not read yet") from None
                raise UserError(f"{directory} lacks the tensor {part.name} of shape {list(part.shape)} that its config asks for") from None
            stored = shards.tensors[name]
            shape = stored.shape
            if entry.ours.endswith(".A_log"):
                _check_a_log(config, shards, name)
            elif shape != part.shape:
                raise UserError(f"{stored.file}: tensor {name} has shape {list(shape)}, the config asks for {list(part.shape)}")
            if stored.dtype not in DTYPES or not DTYPES[stored.dtype].is_floating_point or DTYPES[stored.dtype].itemsize < 2:
                raise UserError(f"{stored.file}: tensor {name} is stored as {stored.dtype}; a plain weight is F32, BF16, F16 or F64")
            used.add(name)
    return used


def _check_a_log(config: ModelConfig, shards: Shards, name: str) -> None:
    """Accept `[H]`, `[1, 1, H, 1]` and zero-padded vectors; a tail that is not zero means a head count that is wrong."""
    stored, heads = shards.tensors[name], config.kda_num_heads
    long_sides = [n for n in stored.shape if n != 1]
    if len(long_sides) > 1 or max(stored.shape, default=1) < heads:
        raise UserError(f"{stored.file}: tensor {name} has shape {list(stored.shape)}, which cannot hold {heads} heads")
    if bool(shards.read(name).flatten()[heads:].any()):
        raise UserError(f"{stored.file}: tensor {name} has values after the {heads} heads of the config, where zero padding belongs")


def _check_leftovers(
    config: ModelConfig, shards: Shards, by_name: Mapping[str, str], used: set[str], directory: Path, allow_unused: bool
) -> None:
    head = by_name.get("lm_head.weight")
    if config.tie_word_embeddings and head is not None:
        embed = shards.read(by_name["embed_tokens.weight"])
        if not torch.equal(shards.read(head), embed):
            raise UserError(f"{directory}: the config ties the head to the embedding, but {head} is stored and differs from it")
        used.add(head)
    left = [name for short, name in by_name.items() if name not in used and not is_vision(short)]
    if left and not allow_unused:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise UserError(f"{directory}: the model does not use {left[0]}{more}; pass allow_unused=True if that is meant")
