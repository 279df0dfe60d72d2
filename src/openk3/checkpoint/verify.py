"""Whether the tensors of a checkpoint are those that its config asks for: decided from headers, before anything is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from openk3.checkpoint.names import Entry, Part, canonical, entries, is_vision
from openk3.checkpoint.shards import DTYPES, StoredTensor
from openk3.config import ModelConfig
from openk3.ops.mx import BLOCK

PACKED, SCALE = "_packed", "_scale"
_SCALE_DTYPES = ("U8", "F8_E8M0")


@dataclass
class Match:
    """Which stored tensor serves which part of the model, and what is wrong."""

    config: ModelConfig
    names: dict[str, str] = field(default_factory=dict)
    """Canonical name of each part (or of its packed bytes and scales) to its name in the files."""
    packed: set[str] = field(default_factory=set)
    """The model's expert parameters whose matrices are packed in 4 bits."""
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    """Stored text tensors that the model does not use."""
    vision: list[str] = field(default_factory=list)
    trunk_dtype: str | None = None
    """The dtype of most plain weights."""


def match(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> Match:
    """Hold the stored tensors against what `Decoder(config)` needs. Nothing is read."""
    result = Match(config)
    by_short: dict[str, str] = {}
    for name in tensors:
        short = canonical(name)
        if short in by_short:
            result.problems.append(f"the tensor {short} is stored twice, as {by_short[short]} and as {name}")
        by_short[short] = name
    used: set[str] = set()
    plain: list[tuple[Entry, str]] = []
    for entry in entries(config):
        if ".experts." in entry.ours and _is_packed(entry, by_short, result):
            result.packed.add(entry.ours)
            for part in entry.parts:
                used.update(_match_packed(part, by_short, tensors, result))
            continue
        for part in entry.parts:
            found = find(part, by_short)
            if found is None:
                result.problems.append(f"the tensor {part.name} of shape {list(part.shape)}, which the config asks for, is not there")
                continue
            used.add(found)
            result.names[part.name] = found
            plain.append((entry, found))
            _check_plain(entry, part, tensors[found], found, config, result)
    _check_pairs(result)
    _check_dtypes(plain, tensors, result)
    if config.tie_word_embeddings and "lm_head.weight" in by_short:
        # Whether it equals the embedding is seen when it is read.
        result.names["lm_head.weight"] = by_short["lm_head.weight"]
        used.add(by_short["lm_head.weight"])
    for short, name in by_short.items():
        if name not in used:
            (result.vision if is_vision(short) else result.unused).append(name)
    return result


def find(part: Part, by_short: Mapping[str, str]) -> str | None:
    """The stored name of a plain part, under any name it goes by."""
    return next((by_short[name] for name in (part.name, *part.aliases) if name in by_short), None)


def _is_packed(entry: Entry, by_short: Mapping[str, str], result: Match) -> bool:
    """By what is stored, never by what the config says; all matrices of one parameter alike."""
    packed = sum(f"{part.name}{PACKED}" in by_short for part in entry.parts)
    plain = sum(find(part, by_short) is not None for part in entry.parts)
    if packed and plain:
        example = next(part.name for part in entry.parts if find(part, by_short) is not None)
        result.problems.append(f"{entry.ours}: {packed} of its matrices are packed and {plain} are plain ({example}): all or none")
    return packed > 0


def _match_packed(part: Part, by_short: Mapping[str, str], tensors: Mapping[str, StoredTensor], result: Match) -> Iterator[str]:
    rows, columns = part.shape
    if columns % BLOCK:
        result.problems.append(f"{part.name} is packed, but its {columns} columns are not blocks of {BLOCK}")
        return
    for suffix, shape, dtypes in ((PACKED, (rows, columns // 2), ("U8",)), (SCALE, (rows, columns // BLOCK), _SCALE_DTYPES)):
        short = part.name + suffix
        name = by_short.get(short)
        if name is None:
            result.problems.append(f"the tensor {short} of shape {list(shape)} is not there, though the layer is packed")
            continue
        stored = tensors[name]
        result.names[short] = name
        if stored.shape != shape:
            result.problems.append(_shape_problem(name, stored, shape))
        if stored.dtype not in dtypes:
            result.problems.append(f"{stored.file}: tensor {name} is stored as {stored.dtype}, not {' or '.join(dtypes)}")
        yield name


def _check_plain(entry: Entry, part: Part, stored: StoredTensor, name: str, config: ModelConfig, result: Match) -> None:
    if entry.ours.endswith(".A_log"):
        heads = config.kda_num_heads
        if len([n for n in stored.shape if n != 1]) > 1 or max(stored.shape, default=1) < heads:
            result.problems.append(f"{stored.file}: tensor {name} has shape {list(stored.shape)}, which cannot hold {heads} heads")
    elif stored.shape != part.shape:
        result.problems.append(_shape_problem(name, stored, part.shape))
    dtype = DTYPES[stored.dtype] if stored.dtype in DTYPES else None
    if dtype is None or not dtype.is_floating_point or dtype.itemsize < 2:
        result.problems.append(f"{stored.file}: tensor {name} is stored as {stored.dtype}; a plain weight is F32, BF16, F16 or F64")


def _shape_problem(name: str, stored: StoredTensor, shape: tuple[int, ...]) -> str:
    return f"{stored.file}: tensor {name} has shape {list(stored.shape)}, the config asks for {list(shape)}"


def _check_pairs(result: Match) -> None:
    """Both parameters of a layer's experts are packed, or neither."""
    for ours in sorted(result.packed):
        other = ours.replace(".w13", ".w2") if ours.endswith(".w13") else ours.replace(".w2", ".w13")
        if other not in result.packed:
            result.problems.append(f"{ours} is packed, {other} is not: all matrices of a layer's experts or none")


def _check_dtypes(plain: list[tuple[Entry, str]], tensors: Mapping[str, StoredTensor], result: Match) -> None:
    """One dtype for the trunk; F32 where the release has F32."""
    trunk = Counter(tensors[name].dtype for entry, name in plain if not is_island(entry.ours))
    if not trunk:
        return
    result.trunk_dtype = trunk.most_common(1)[0][0]
    for entry, name in plain:
        dtype = tensors[name].dtype
        if is_island(entry.ours):
            if dtype in ("BF16", "F16"):
                result.warnings.append(f"tensor {name} is stored as {dtype}, where the release has F32: what it lost is lost")
        elif dtype != result.trunk_dtype:
            result.problems.append(
                f"{tensors[name].file}: tensor {name} is stored as {dtype}, most of the model ({trunk[result.trunk_dtype]} tensors) as "
                f"{result.trunk_dtype}"
            )


def is_island(ours: str) -> bool:
    """Whether a parameter of the model is F32 in the release whatever the trunk is."""
    return ours.endswith((".A_log", ".dt_bias", "_conv", ".o_norm", ".router.bias"))
