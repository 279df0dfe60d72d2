"""A full check of a checkpoint before any compute: from headers alone, or with the values read too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from openk3.checkpoint.load import locate
from openk3.checkpoint.names import canonical
from openk3.checkpoint.quantization import expert_inputs_of, stated
from openk3.checkpoint.shards import Shards, StoredTensor, Survey, survey
from openk3.checkpoint.verify import SCALE, Match, match
from openk3.config import ModelConfig
from openk3.errors import UserError
from openk3.ops.mx import NAN_SCALE

_CONFIG_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
_ROWS = 1 << 24


@dataclass
class Inspection:
    """What a checkpoint holds, and what is wrong with it. Warnings do not make it unsound."""

    directory: Path
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, int | str] = field(default_factory=dict)
    dtypes: dict[str, int] = field(default_factory=dict)
    """Tensors by stored dtype."""

    @property
    def sound(self) -> bool:
        """Whether the checkpoint would load and compute what its config says."""
        return not self.problems


def inspect_checkpoint(path: str | Path, *, deep: bool = False, progress: Callable[[int, int], None] | None = None) -> Inspection:
    """Check the checkpoint at `path` (a run means its newest): index against files, header extents against file sizes, shapes and
    dtypes against the config, duplicates, leftovers. `deep` reads every value too: NaN scale codes, weights that are not finite, a tail
    of `A_log` that is not padding, a tied head that differs. `progress` hears bytes read and bytes in all.

    Raises UserError only when there is nothing to inspect.
    """
    directory = locate(path)
    result = Inspection(directory)
    found = survey(directory)
    result.problems += found.problems
    _count(found, result)
    config = _config(directory, result)
    if config is None:
        return result
    held = match(config, found.tensors)
    result.problems += held.problems
    result.problems += [f"the model does not use the tensor {name}" for name in held.unused]
    result.warnings += held.warnings
    _describe(config, held, found, result)
    if deep and not result.problems:
        _read_values(config, held, found, result, progress)
    return result


def _config(directory: Path, result: Inspection) -> ModelConfig | None:
    try:
        return ModelConfig.from_json(directory / "config.json")
    except UserError as error:
        result.problems.append(str(error))
        return None


def _count(found: Survey, result: Inspection) -> None:
    total = sum(tensor.nbytes for tensor in found.tensors.values())
    result.facts |= {"files": len(found.files), "tensors": len(found.tensors), "tensor_bytes": total}
    result.dtypes = dict(Counter(tensor.dtype for tensor in found.tensors.values()).most_common())
    if found.index_bytes is not None and found.index_bytes != total and not found.problems:
        result.warnings.append(f"the index states a total_size of {found.index_bytes} bytes, the tensors have {total}")


def _describe(config: ModelConfig, held: Match, found: Survey, result: Inspection) -> None:
    packed = sum(name.endswith("_packed") for name in held.names)
    stored_parameters = 0
    for name, tensor in found.tensors.items():
        if canonical(name).endswith(SCALE) and tensor.dtype in ("U8", "F8_E8M0"):
            continue
        items = 1
        for side in tensor.shape:
            items *= side
        stored_parameters += items * 2 if name.endswith("_packed") else items
    result.facts |= {
        "family": config.family,
        "layers": config.num_layers,
        "trunk_dtype": held.trunk_dtype or "none",
        "packed_matrices": packed,
        "vision_tensors": len(held.vision),
        "stored_parameters": stored_parameters,
    }
    try:
        block = stated(config)
        if packed:
            result.facts["expert_inputs"] = expert_inputs_of(config)
    except UserError as error:
        result.problems.append(str(error))
        return
    if block is not None and block.get("quantization_status", "compressed") == "compressed" and not packed:
        result.warnings.append("the config says that experts are packed, the files hold plain ones: what is stored decides")
    if packed and block is None:
        result.warnings.append("the files hold packed experts, the config does not say so: what is stored decides")
    for level in ("text", "top"):
        kept = config.passthrough.get(level, {})
        dtype = kept.get("dtype", kept.get("torch_dtype"))
        if held.trunk_dtype and dtype in _CONFIG_DTYPES and _CONFIG_DTYPES[dtype] != held.trunk_dtype:
            result.warnings.append(f"the config says {dtype}, the trunk is stored as {held.trunk_dtype}")
            break


def _read_values(config: ModelConfig, held: Match, found: Survey, result: Inspection, progress: Callable[[int, int], None] | None) -> None:
    shards = Shards(found.tensors)
    total, done = sum(tensor.nbytes for tensor in found.tensors.values()), 0
    scales = {name for short, name in held.names.items() if short.endswith(SCALE)}
    a_logs = {name: short for short, name in held.names.items() if short.endswith(".A_log")}
    for name, stored in found.tensors.items():
        try:
            complaint = _value_problem(shards, name, stored, scale=name in scales, heads=config.kda_num_heads if name in a_logs else None)
        except UserError as error:
            complaint = str(error)
        if complaint:
            result.problems.append(complaint)
        done += stored.nbytes
        if progress is not None:
            progress(done, total)
    head, embedding = held.names.get("lm_head.weight"), held.names.get("embed_tokens.weight")
    if config.tie_word_embeddings and head and embedding and not torch.equal(shards.read(head), shards.read(embedding)):
        result.problems.append(f"the config ties the head to the embedding, but {head} is stored and differs from it")


def _value_problem(shards: Shards, name: str, stored: StoredTensor, *, scale: bool, heads: int | None) -> str | None:
    value = shards.read(name)
    where = f"{stored.file}: tensor {name}"
    if scale:
        codes = value if value.dtype == torch.uint8 else value.view(torch.uint8)
        bad = int((codes == NAN_SCALE).sum())
        return f"{where} has {bad} scale codes of 255, which mean NaN" if bad else None
    if not value.is_floating_point():
        return None
    bad = sum(int((~piece.float().isfinite()).sum()) for piece in value.flatten().split(_ROWS))
    if bad:
        return f"{where} has {bad} values that are not finite"
    if heads is not None and bool(value.flatten()[heads:].any()):
        return f"{where} has values after the {heads} heads of the config, where zero padding belongs"
    return None
