"""Safetensors files written one tensor at a time: what is declared first is produced when its turn comes, and then let go."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from openk3.checkpoint.shards import DTYPES, INDEX_FILE

SHARD_BYTES = 5 * 10**9
CODES = {dtype: code for code, dtype in DTYPES.items()}
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Pending:
    """A tensor that will be written: its header entry now, its values when asked."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    produce: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize


def pending(name: str, tensor: Tensor) -> Pending:
    """A tensor that is already there."""
    return Pending(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)


def write_checkpoint(
    tensors: Sequence[Pending], directory: Path, *, shard_bytes: int = SHARD_BYTES, progress: Callable[[int], None] | None = None
) -> list[Path]:
    """Write `tensors` into `directory`: one `model.safetensors`, or numbered shards of at most `shard_bytes` and their index.

    `progress` hears the bytes of each tensor written. Returns the files. Raises OSError as the file system does.
    """
    shards = _divide(tensors, shard_bytes)
    if len(shards) == 1:
        file = directory / "model.safetensors"
        _write_file(shards[0], file, progress)
        return [file]
    weight_map: dict[str, str] = {}
    files = []
    for number, shard in enumerate(shards, start=1):
        file = directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(shard, file, progress)
        weight_map |= dict.fromkeys((tensor.name for tensor in shard), file.name)
        files.append(file)
    total = sum(tensor.nbytes for tensor in tensors)
    index = directory / INDEX_FILE
    index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n", encoding="utf-8")
    return [*files, index]


def _divide(tensors: Iterable[Pending], shard_bytes: int) -> list[list[Pending]]:
    shards: list[list[Pending]] = [[]]
    held = 0
    for tensor in tensors:
        if shards[-1] and held + tensor.nbytes > shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(tensor)
        held += tensor.nbytes
    return shards


def _write_file(tensors: Sequence[Pending], file: Path, progress: Callable[[int], None] | None) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # Wide elements first, as the format's own writer has it: then every tensor is aligned to its element.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    for tensor in ordered:
        header[tensor.name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for tensor in ordered:
            value = tensor.produce()
            if tuple(value.shape) != tensor.shape or value.dtype != tensor.dtype:
                raise ValueError(f"{tensor.name} was declared {tensor.dtype} {tensor.shape} and is {value.dtype} {tuple(value.shape)}")
            if value.numel():
                stream.write(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            if progress is not None:
                progress(tensor.nbytes)
