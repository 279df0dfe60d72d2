"""From one precision to another, file to file: what need not change passes through untouched, and no more than a tensor is in memory.

Names, prefixes, vision tensors and the dtypes of everything but the routed experts stay those of the source.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from openk3.checkpoint.load import locate
from openk3.checkpoint.names import entries
from openk3.checkpoint.quantization import block, expert_inputs_of, scale_rule_of, stated, with_block
from openk3.checkpoint.shards import DTYPES, Shards, first_of
from openk3.checkpoint.verify import PACKED, SCALE, Match, is_island, match
from openk3.checkpoint.writer import SHARD_BYTES, Pending, write_checkpoint
from openk3.config import ModelConfig
from openk3.errors import UserError
from openk3.ops.experts import ExpertInputs
from openk3.ops.mx import BLOCK, MXTensor, ScaleRule, quantize

Target = Literal["bf16", "mxfp4"]
Trunk = Literal["keep", "bf16", "fp32"]

_WEIGHTS = re.compile(r".*\.safetensors(\.index\.json)?|config\.json|training\.pt|manifest\.json")


@dataclass(frozen=True)
class Conversion:
    """What was written."""

    directory: Path
    tensors: int
    nbytes: int
    packed: int
    """Matrices packed here."""
    unpacked: int
    passed: int
    """Tensors whose bytes were not touched."""


def convert(
    source: str | Path,
    destination: str | Path,
    to: Target,
    *,
    trunk: Trunk = "keep",
    scale_rule: ScaleRule | None = None,
    inputs: ExpertInputs | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Write `source` (a run or a release, packed or plain) to `destination` with its routed experts in another precision.

    `to` "mxfp4" packs plain experts by `scale_rule` (None: the one they were trained under, else "even") and leaves packed ones as they
    are; "bf16" unpacks them and casts the trunk. `trunk` casts the rest of the text model ("keep" for mxfp4). `inputs` is recorded as the
    format in which experts read their inputs; None keeps what the source says. `progress` hears bytes done and bytes in all.

    The destination appears whole or not at all. Raises UserError when the source is not sound or the destination is not empty.
    """
    if to not in ("bf16", "mxfp4") or trunk not in ("keep", "bf16", "fp32"):
        raise UserError(f"a checkpoint is converted to bf16 or mxfp4 with a trunk of keep, bf16 or fp32, not {to!r} and {trunk!r}")
    directory, target = locate(source), Path(destination)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists and is not empty: give a new directory")
    config = ModelConfig.from_json(directory / "config.json")
    shards = Shards.at(directory)
    found = match(config, shards.tensors)
    problems = found.problems + [f"the model does not use the tensor {name}" for name in found.unused]
    if problems:
        raise UserError(f"{directory}: {first_of(problems)}")
    rule = scale_rule or scale_rule_of(config) or "even"
    plan = _Plan(shards, found, to, "bf16" if to == "bf16" and trunk == "keep" else trunk, rule)
    tensors = list(plan.tensors())
    total = sum(tensor.nbytes for tensor in tensors)
    done = 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    target.parent.mkdir(parents=True, exist_ok=True)
    building = target.with_name(f".{target.name}.writing")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        write_checkpoint(tensors, building, shard_bytes=shard_bytes, progress=count)
        settings = _described(config, found, to, inputs)
        content = settings.to_json(dtype=plan.trunk_name())
        (building / "config.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        for file in sorted(directory.iterdir()):
            if file.is_file() and not _WEIGHTS.fullmatch(file.name):
                shutil.copyfile(file, building / file.name)
        if target.exists():
            target.rmdir()
        building.rename(target)
    except OSError as error:
        raise UserError(f"{target} could not be written: {error.strerror or error}; nothing was left there") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return Conversion(target, len(tensors), total, plan.packed, plan.unpacked, plan.passed)


def _described(config: ModelConfig, found: Match, to: Target, inputs: ExpertInputs | None) -> ModelConfig:
    """The config with the quantization block that fits what is written; a release's own block stays when its packing does."""
    if to == "bf16":
        return with_block(config, None)
    kept = stated(config)
    if found.packed and kept is not None and inputs in (None, expert_inputs_of(config)):
        return config
    return with_block(config, block(inputs or expert_inputs_of(config)))


class _Plan:
    """Every tensor of the source in order, and what becomes of it."""

    def __init__(self, shards: Shards, found: Match, to: Target, trunk: Trunk, rule: ScaleRule) -> None:
        self.shards, self.found, self.to, self.trunk, self.rule = shards, found, to, trunk, rule
        self.packed = self.unpacked = self.passed = 0
        self.experts: dict[str, str] = {}
        self.islands: set[str] = set()
        for entry in entries(found.config):
            for part in entry.parts:
                if ".experts." in entry.ours:
                    for suffix in (PACKED, SCALE) if entry.ours in found.packed else ("",):
                        self.experts[found.names[part.name + suffix]] = part.name
                elif is_island(entry.ours):
                    self.islands.add(found.names[part.name])
        self.vision = set(found.vision)
        self._last: tuple[str, MXTensor] | None = None

    def tensors(self) -> Iterator[Pending]:
        """The tensors to write."""
        for name, stored in self.shards.tensors.items():
            if name in self.experts:
                yield from self._expert(name, stored.shape)
            else:
                dtype = DTYPES[stored.dtype]
                cast = self.trunk != "keep" and name not in self.islands and name not in self.vision
                yield self._pass(name, self._trunk_dtype() if cast else dtype, stored.shape)

    def trunk_name(self) -> str:
        """The trunk's dtype as config.json spells it."""
        return str(self._trunk_dtype()).removeprefix("torch.")

    def _trunk_dtype(self) -> torch.dtype:
        stored = DTYPES[self.found.trunk_dtype or "F32"]
        return {"keep": stored, "bf16": torch.bfloat16, "fp32": torch.float32}[self.trunk]

    def _pass(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Pending:
        self.passed += dtype == DTYPES[self.shards.tensors[name].dtype]
        return Pending(name, dtype, shape, lambda: self.shards.read(name).to(dtype))

    def _expert(self, name: str, shape: tuple[int, ...]) -> Iterator[Pending]:
        if self.to == "mxfp4" and name.endswith("weight"):
            yield from self._pack(name, shape)
        elif self.to == "bf16" and name.endswith(PACKED):
            self.unpacked += 1
            base = name.removesuffix(PACKED)
            yield Pending(base, torch.bfloat16, (shape[0], shape[1] * 2), lambda: self._unpack(base))
        elif self.to == "mxfp4" or not name.endswith(SCALE):
            yield self._pass(name, torch.bfloat16 if self.to == "bf16" else DTYPES[self.shards.tensors[name].dtype], shape)

    def _pack(self, name: str, shape: tuple[int, ...]) -> Iterator[Pending]:
        if shape[1] % BLOCK:
            raise UserError(f"{name} has {shape[1]} columns, which MXFP4 cannot pack: it takes blocks of {BLOCK}")
        self.packed += 1
        yield Pending(name + PACKED, torch.uint8, (shape[0], shape[1] // 2), lambda: self._quantized(name).packed)
        yield Pending(name + SCALE, torch.uint8, (shape[0], shape[1] // BLOCK), lambda: self._quantized(name).scale)

    def _quantized(self, name: str) -> MXTensor:
        # Codes and scales of a matrix are written one after the other: the last result serves both.
        if self._last is None or self._last[0] != name:
            self._last = (name, quantize(self.shards.read(name), "mxfp4", self.rule))
        return self._last[1]

    def _unpack(self, base: str) -> Tensor:
        packed, scale = self.shards.read(base + PACKED), self.shards.read(base + SCALE)
        return MXTensor("mxfp4", packed, scale, packed.shape[1] * 2).dequantize(torch.bfloat16)
