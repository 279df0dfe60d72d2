"""Safetensors files of one checkpoint as one set of tensors: headers checked before anything is read, tensors mapped one at a time."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from openk3.errors import UserError

INDEX_FILE = "model.safetensors.index.json"
_HEADER_LIMIT = 512 * 2**20
_ITEM_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8,
}  # fmt: skip
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16,
    "I32": torch.int32, "I64": torch.int64, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a header says of one tensor."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Byte offset in the file."""
    nbytes: int


@dataclass(frozen=True)
class Survey:
    """All that the headers of a checkpoint directory say, and what is wrong with them."""

    tensors: dict[str, StoredTensor]
    files: tuple[Path, ...]
    problems: tuple[str, ...]
    index_bytes: int | None = None
    """`total_size` of the index, where there is one."""


def survey(directory: Path) -> Survey:
    """Read the index and every header of `directory`; no tensor is touched. Shards are what the index names, or `model*.safetensors`."""
    index = directory / INDEX_FILE
    found = sorted(directory.glob("model*.safetensors"))
    problems: list[str] = []
    listed: dict[str, str] | None = None
    total: int | None = None
    if index.exists():
        try:
            listed, total = _read_index(index)
        except UserError as error:
            problems.append(str(error))
    files = found if listed is None else sorted({directory / file for file in listed.values()})
    if not files:
        problems.append(f"{directory} holds no model*.safetensors: is it a checkpoint or a run directory?")
    stored: dict[str, StoredTensor] = {}
    whole = True
    for file in files:
        if not file.is_file():
            problems.append(f"{index} names the shard {file.name}, which is not there")
            whole = False
            continue
        try:
            header = read_header(file)
        except UserError as error:
            problems.append(str(error))
            whole = False
            continue
        problems += [f"tensor {name} is both in {stored[name].file.name} and in {file.name}" for name in header.keys() & stored.keys()]
        stored |= header
    if listed is not None:
        problems += _compare(index, listed, stored, whole)
        extra = [file.name for file in found if file not in set(files)]
        problems += [
            f"{name} is not named by {index.name}: a leftover of another checkpoint? Remove it or rewrite the index" for name in extra
        ]
    return Survey(stored, tuple(files), tuple(problems), total)


class Shards:
    """All tensors of a sound checkpoint directory by the names in the files, read one at a time."""

    def __init__(self, tensors: dict[str, StoredTensor]) -> None:
        self.tensors = tensors
        self._open: dict[Path, Any] = {}

    @staticmethod
    def at(directory: Path) -> Shards:
        """The tensors of `directory`. Raises UserError with the first problem of `survey`, and how many more there are."""
        found = survey(directory)
        if found.problems:
            raise UserError(first_of(found.problems))
        return Shards(found.tensors)

    def read(self, name: str) -> Tensor:
        """The tensor `name`, mapped from its file.

        Raises UserError when the file cannot be read any more.
        """
        stored = self.tensors[name]
        try:
            handle = self._open.get(stored.file)
            if handle is None:
                handle = self._open[stored.file] = safetensors.safe_open(stored.file, framework="pt")
            return handle.get_tensor(name)
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{stored.file}: tensor {name} cannot be read: {error}") from error


def first_of(problems: Sequence[str]) -> str:
    """One line: the first problem, and how many others there are."""
    more = len(problems) - 1
    return problems[0] if not more else f"{problems[0]} (and {more} more: openk3 inspect shows all)"


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors that a safetensors file declares, checked against the file's size.

    Raises UserError saying what is wrong in which file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = stream.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
            if not 2 <= length <= min(size - 8, _HEADER_LIMIT):
                raise UserError(
                    f"{file} is not a safetensors file, or is truncated: its header length reads {length}, its size {size} bytes"
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} has a damaged header: {error}") from error
    if not isinstance(header, dict):
        raise UserError(f"{file} has a damaged header: it is not a JSON object")
    data_start = 8 + length
    tensors = {name: _entry(file, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"}
    end = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if tensor.start != end:
            raise UserError(f"{file}: tensor {name} starts at byte {tensor.start}, where byte {end} was expected (a gap or an overlap)")
        end += tensor.nbytes
    if end > size:
        raise UserError(f"{file} is truncated: its header declares {end} bytes, the file has {size}")
    if end < size:
        raise UserError(f"{file} has {size - end} bytes after its last tensor: damaged, or written by something else")
    return tensors


def _entry(file: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    where = f"{file}: tensor {name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise UserError(f"{where} has a damaged header entry: it needs dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_BITS:
        raise UserError(f"{where} has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise UserError(f"{where} has the impossible shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and 0 <= n < 2**63 for n in offsets):
        raise UserError(f"{where} has impossible data_offsets {offsets!r}")
    expected = math.prod(shape) * _ITEM_BITS[dtype] // 8
    if offsets[1] - offsets[0] != expected:
        raise UserError(f"{where}: {dtype} {shape} takes {expected} bytes, data_offsets give {offsets[1] - offsets[0]}")
    return StoredTensor(file, dtype, tuple(shape), data_start + offsets[0], expected)


def _read_index(index: Path) -> tuple[dict[str, str], int | None]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{index} cannot be read: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise UserError(f"{index} has no weight_map from tensor names to file names")
    for file in set(weight_map.values()):
        if Path(file).name != file or file in ("", ".", ".."):
            name = next(name for name, other in weight_map.items() if other == file)
            raise UserError(f"{index} places tensor {name} in {file!r}; shards lie beside the index")
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, total if type(total) is int else None


def _compare(index: Path, listed: dict[str, str], stored: dict[str, StoredTensor], whole: bool) -> list[str]:
    """Where the index and the headers disagree. A file that could not be read is already a problem; what it should hold is not another."""
    problems = []
    for name, file in listed.items():
        if name in stored:
            if stored[name].file.name != file:
                problems.append(f"{index.name} places tensor {name} in {file}, but it is in {stored[name].file.name}")
        elif whole:
            problems.append(f"{index.name} places tensor {name} in {file}, but that file does not hold it")
    problems += [f"{stored[name].file} holds tensor {name}, which {index.name} does not list" for name in stored if name not in listed]
    return problems
