"""Every tensor that the files of a model hold, from its config alone: names, shapes and dtypes of the release layout, without weights.

For the release it gives the published 497,220 tensors, vision tower and projector included. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from openk3.accounting import parameters
from openk3.accounting.memory import MX_BLOCK
from openk3.checkpoint.names import Part, entries, full_name
from openk3.config import ModelConfig
from openk3.errors import UserError

ExpertFormat = Literal["plain", "mxfp4"]


class StoredTensor(NamedTuple):
    """One tensor of a file: its full name, its shape, and its dtype as safetensors spells it (`BF16`, `F32`, `U8`, …)."""

    name: str
    shape: tuple[int, ...]
    dtype: str


K3_VISION_CONFIG: Mapping[str, Any] = {
    "init_pos_emb_height": 64,
    "init_pos_emb_width": 64,
    "merge_kernel_size": [2, 2],
    "mm_hidden_size": 1024,
    "patch_size": 14,
    "qkv_hidden_size": 1536,
    "text_hidden_size": 7168,
    "vt_hidden_size": 1024,
    "vt_intermediate_size": 4096,
    "vt_num_hidden_layers": 27,
}
"""The sizes in the release's `vision_config` that shape its 168 vision tensors."""


def tensor_inventory(config: ModelConfig, *, experts: ExpertFormat = "plain", trunk: str = "BF16") -> Iterator[StoredTensor]:
    """The text tensors of `config` in file order. With `experts="mxfp4"` each expert matrix is a packed tensor and one of scales.

    `trunk` is the dtype of all but what the release keeps in F32 (and of plain experts).
    """
    islands = {parameter.name for parameter in parameters(config) if parameter.island}
    stacks = {parameter.name for parameter in parameters(config) if parameter.kind == "experts"}
    for entry in entries(config):
        dtype = "F32" if entry.ours in islands and trunk != "F64" else trunk
        for part in entry.parts:
            name = full_name(part.name, config)
            if experts == "mxfp4" and entry.ours in stacks:
                yield from _packed(name, part)
            else:
                yield StoredTensor(name, part.shape, dtype)


def _packed(name: str, part: Part) -> Iterator[StoredTensor]:
    rows, columns = part.shape
    if columns % MX_BLOCK:
        raise UserError(f"{name} has {columns} columns: MXFP4 packs blocks of {MX_BLOCK}, so experts' widths must be multiples of it")
    yield StoredTensor(f"{name}_packed", (rows, columns // 2), "U8")
    yield StoredTensor(f"{name}_scale", (rows, columns // MX_BLOCK), "U8")


def vision_inventory(vision: Mapping[str, Any], *, dtype: str = "BF16") -> Iterator[StoredTensor]:
    """The tensors of the vision tower and its projector that a `vision_config` implies (MoonViT-V2; Kimi K3 report §2.4).

    Raises UserError for a size that is missing or no whole number.
    """

    def size(key: str) -> int:
        value = vision.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"vision_config.{key} is {value!r}: it must be a whole number, 1 or more")
        return value

    width, inner, attention, patch = size("vt_hidden_size"), size("vt_intermediate_size"), size("qkv_hidden_size"), size("patch_size")
    merge = vision.get("merge_kernel_size")
    if not isinstance(merge, (list, tuple)) or len(merge) != 2 or not all(isinstance(side, int) and side > 0 for side in merge):
        raise UserError(f"vision_config.merge_kernel_size is {merge!r}: it must be two whole numbers")
    merged, text = size("mm_hidden_size") * merge[0] * merge[1], size("text_hidden_size")
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (width, 3, patch, patch),
        "vision_tower.patch_embed.pos_emb.weight": (size("init_pos_emb_height"), size("init_pos_emb_width"), width),
    }
    for layer in range(size("vt_num_hidden_layers")):
        root = f"vision_tower.encoder.blocks.{layer}"
        shapes |= {f"{root}.norm0.weight": (width,), f"{root}.norm1.weight": (width,)}
        shapes |= {f"{root}.wqkv.weight": (3 * attention, width), f"{root}.wo.weight": (width, attention)}
        shapes |= {f"{root}.mlp.fc0.weight": (inner, width), f"{root}.mlp.fc1.weight": (width, inner)}
    shapes["vision_tower.encoder.final_layernorm.weight"] = (width,)
    shapes |= {"mm_projector.proj.0.weight": (merged, merged), "mm_projector.proj.2.weight": (text, merged)}
    shapes["mm_projector.post_norm.weight"] = (text,)
    for name, shape in shapes.items():
        yield StoredTensor(name, shape, dtype)
