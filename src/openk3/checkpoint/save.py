"""From a model to files in the release's layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from openk3.checkpoint.names import Part, entries, full_name
from openk3.checkpoint.shards import INDEX_FILE
from openk3.model.decoder import Decoder

SHARD_BYTES = 5 * 10**9


@torch.no_grad()
def save_release(model: Decoder, directory: str | Path, *, shard_bytes: int = SHARD_BYTES) -> list[Path]:
    """Write `config.json` and the weights of `model` into `directory`, which is made if it is not there; returns the files written.

    Names, prefixes and shapes are those of the config's family; dtypes are the model's, fp32 where the release has F32. More than
    `shard_bytes` of tensors are split into numbered shards with an index. Nothing here is atomic: write to a temporary
    directory and rename it. Raises OSError as the file system does.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    shards: list[dict[str, Tensor]] = [{}]
    held = 0
    for entry in entries(model.config):
        for part in entry.parts:
            tensor = _stored(own[entry.ours], part)
            if shards[-1] and held + tensor.nbytes > shard_bytes:
                shards.append({})
                held = 0
            shards[-1][full_name(part.name, model.config)] = tensor
            held += tensor.nbytes
    written = _write(shards, directory)
    config = directory / "config.json"
    stated = model.config.to_json(dtype=str(model.dtype).removeprefix("torch."))
    config.write_text(json.dumps(stated, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return [config, *written]


def _stored(tensor: Tensor, part: Part) -> Tensor:
    value = tensor.detach()[part.place] if part.place else tensor.detach()
    value = value.cpu()
    if value.shape == part.shape:
        return value.contiguous()
    stored = value.new_zeros(part.shape)
    stored.view(-1)[: value.numel()] = value.flatten()
    return stored


def _write(shards: list[dict[str, Tensor]], directory: Path) -> list[Path]:
    if len(shards) == 1:
        file = directory / "model.safetensors"
        save_file(shards[0], file, metadata={"format": "pt"})
        return [file]
    weight_map: dict[str, str] = {}
    files = []
    for number, tensors in enumerate(shards, start=1):
        file = directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file.name)
        files.append(file)
    total = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
    index = directory / INDEX_FILE
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n", encoding="utf-8")
    return [*files, index]
