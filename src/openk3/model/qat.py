"""Quantization-aware training: routed experts see themselves as they will be served (Kimi K3 report §4.1.1).

Weights in MXFP4 and inputs in MXFP8; what the report leaves open (E4M3, blocks of 32, the scale rule, straight-through gradients) is
openk3's choice.
"""

from __future__ import annotations

from openk3.model.decoder import Decoder
from openk3.model.moe import Experts
from openk3.ops.experts import ExpertInputs
from openk3.ops.mx import BLOCK, ScaleRule


def set_quantization(model: Decoder, weight_rule: ScaleRule | None, inputs: ExpertInputs) -> int:
    """Let every routed expert of `model` compute with weights rounded to MXFP4 by `weight_rule` (None: as they are) and inputs in `inputs`.

    Masters stay as they are. Returns how many layers were set. Raises ValueError when a matrix cannot be packed: its columns are not
    whole blocks.
    """
    changed = 0
    for module in model.modules():
        if not isinstance(module, Experts):
            continue
        for name, weight in (("w13", module.w13), ("w2", module.w2)):
            if weight_rule is not None and weight.shape[2] % BLOCK:
                raise ValueError(f"experts' {name} has {weight.shape[2]} columns; MXFP4 packs whole blocks of {BLOCK}")
        module.weight_rule = weight_rule
        module.inputs = inputs
        changed += 1
    return changed
