"""`openk3 inspect PATH`: is this checkpoint sound? And `--config NAME`: which tensors would such a model have?"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from openk3.commands import _base
from openk3.errors import UserError

SUMMARY = "check a checkpoint before any compute, or count the tensors of a config"
EXAMPLES = (
    "openk3 inspect runs/demo",
    "openk3 inspect path/to/release --deep",
    "openk3 inspect --config k3",
)
_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of `openk3 inspect`."""

    path: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CHECKPOINT]")] = None
    """A checkpoint directory, or a run directory (its newest checkpoint)."""
    config: str | None = None
    """A named config or a config.json: print the inventory that it implies, without weights."""
    deep: bool = False
    """Read every value too: NaN scale codes, weights that are not finite, padding."""
    experts: Literal["auto", "plain", "mxfp4"] = "auto"
    """With --config: how routed experts are stored. auto: packed where the config says so, and for k3."""
    json: bool = False
    """Print one JSON object instead."""


def main(argv: list[str]) -> int:
    """Run the verb; returns 0 when the checkpoint is sound, 1 when it is not."""
    arguments = _base.parse(
        Arguments, argv, verb="inspect", description=SUMMARY, examples=EXAMPLES, markers=(tyro.conf.FlagCreatePairsOff,)
    )
    if (arguments.path is None) == (arguments.config is None):
        raise UserError("give either the PATH of a checkpoint or --config NAME")
    if arguments.config is not None:
        return _inventory(arguments.config, arguments)
    assert arguments.path is not None
    return _check(arguments.path, arguments)


def _check(path: str, arguments: Arguments) -> int:
    from openk3.checkpoint.inspect import inspect_checkpoint
    from openk3.commands.progress import bytes_progress

    with bytes_progress("reading values", quiet=arguments.json or not arguments.deep) as progress:
        found = inspect_checkpoint(path, deep=arguments.deep, progress=progress)
    if arguments.json:
        content = {
            "path": str(found.directory), "sound": found.sound, "problems": found.problems, "warnings": found.warnings,
            "dtypes": found.dtypes, **found.facts,
        }  # fmt: skip
        print(json.dumps(content, indent=2))
        return 0 if found.sound else 1
    print(found.directory)
    _print_facts(found.facts | {f"tensors in {dtype}": count for dtype, count in found.dtypes.items()})
    for kind, lines in (("warning", found.warnings), ("problem", found.problems)):
        for line in lines[:_SHOWN]:
            print(f"{kind}: {line}")
        if len(lines) > _SHOWN:
            print(f"… and {len(lines) - _SHOWN} more {kind}s; --json prints all")
    how = "headers and values" if arguments.deep else "headers"
    print(f"sound ({how})" if found.sound else f"not sound: {len(found.problems)} problem{'s' if len(found.problems) > 1 else ''} ({how})")
    return 0 if found.sound else 1


def _inventory(source: str, arguments: Arguments) -> int:
    from openk3.checkpoint.inventory import K3_VISION_CONFIG, ExpertFormat, StoredTensor, tensor_inventory, vision_inventory
    from openk3.config import resolve

    config = resolve(source)
    release = source == "k3"
    kept = config.passthrough
    packed = release or any("quantization_config" in kept.get(level, {}) for level in ("text", "top"))
    experts: ExpertFormat = ("mxfp4" if packed else "plain") if arguments.experts == "auto" else arguments.experts
    vision_config: Any = kept.get("top", {}).get("vision_config") or (K3_VISION_CONFIG if release else None)
    tensors: list[StoredTensor] = list(tensor_inventory(config, experts=experts))
    vision = list(vision_inventory(vision_config)) if vision_config else []
    facts: dict[str, int | str] = {
        "config": source,
        "family": config.family,
        "experts": experts,
        "tensors": len(tensors) + len(vision),
        "text_tensors": len(tensors),
        "vision_tensors": len(vision),
        "routed_matrices": len(config.moe_layers) * (config.num_experts or 0) * 3,
        "stored_parameters": sum(_parameters(tensor) for tensor in [*tensors, *vision]),
        "stored_text_parameters": sum(map(_parameters, tensors)),
        "tensor_bytes": sum(map(_nbytes, [*tensors, *vision])),
    }
    if arguments.json:
        print(json.dumps(facts, indent=2))
        return 0
    _print_facts(facts)
    by_dtype = Counter(tensor.dtype for tensor in [*tensors, *vision])
    _print_facts({f"tensors in {dtype}": count for dtype, count in by_dtype.most_common()})
    return 0


def _parameters(tensor: Any) -> int:
    if tensor.name.endswith("weight_scale"):
        return 0
    return math.prod(tensor.shape) * (2 if tensor.name.endswith("weight_packed") else 1)


def _nbytes(tensor: Any) -> int:
    return math.prod(tensor.shape) * {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "U8": 1}[tensor.dtype]


def _print_facts(facts: dict[str, int | str]) -> None:
    """Numbers that identify something are printed whole."""
    for name, value in facts.items():
        print(f"  {name.replace('_', ' '):<24} {value:,}" if isinstance(value, int) else f"  {name.replace('_', ' '):<24} {value}")
