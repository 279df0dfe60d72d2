"""From a model to files in the release's layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from openk3.checkpoint.names import Entry, Part, entries, full_name
from openk3.checkpoint.verify import PACKED, SCALE
from openk3.checkpoint.writer import SHARD_BYTES, Pending, pending, write_checkpoint
from openk3.model.decoder import Decoder


@torch.no_grad()
def save_release(model: Decoder, directory: str | Path, *, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write `config.json` and the weights of `model` into `directory`, which is made if it is not there; returns the files written.

    Names, prefixes and shapes are those of the config's family; dtypes are the model's, fp32 where the release has F32; packed experts
    are written as they are held. More than `shard_bytes` of tensors are split into numbered shards with an index. Nothing here is
    atomic: write to a temporary directory and rename it. Raises OSError as the file system does.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    written = write_checkpoint(list(_tensors(model)), directory, shard_bytes=shard_bytes)
    config = directory / "config.json"
    content = model.config.to_json(dtype=str(model.dtype).removeprefix("torch."))
    config.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return [config, *written]


def _tensors(model: Decoder) -> Iterator[Pending]:
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for entry in entries(model.config):
        suffixes = ("",) if entry.ours in own else (PACKED, SCALE)
        for part in entry.parts:
            for suffix in suffixes:
                yield pending(full_name(part.name + suffix, model.config), _stored(own[entry.ours + suffix], entry, part))


def _stored(tensor: Tensor, entry: Entry, part: Part) -> Tensor:
    value = tensor.detach()[part.place] if part.place else tensor.detach()
    if not entry.ours.endswith(".A_log"):
        return value
    padded = value.new_zeros(part.shape)
    padded.view(-1)[: value.numel()] = value
    return padded
