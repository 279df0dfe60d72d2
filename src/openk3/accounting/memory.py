"""Bytes: of weights at a precision, and of what a sequence remembers.

A sequence remembers three things (and nothing else grows or stays): KDA's recurrent state, of a fixed size; the tails of its short
convolutions, of a fixed size; MLA's latents, a fixed number of values per token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from openk3.accounting.parameters import SYSTEMS, parameters
from openk3.config import ModelConfig
from openk3.errors import UserError

MX_BLOCK = 32
"""Columns that share one scale byte in the MX formats (OCP MX v1.0, arXiv 2310.10537)."""

_BITS = {"fp64": 64, "fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "mxfp8": 8, "mxfp4": 4}
_SPELLINGS = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
PRECISIONS = tuple(_BITS)


def precision_name(name: str) -> str:
    """The short name of a precision: `bf16` for `bfloat16` and `torch.bfloat16`. Raises UserError for one that is not known."""
    short = name.removeprefix("torch.")
    short = _SPELLINGS.get(short, short)
    if short not in _BITS:
        raise UserError(f"{name!r} is no precision; there are {', '.join(PRECISIONS)}")
    return short


def tensor_bytes(shape: tuple[int, ...], precision: str) -> int:
    """Bytes of a tensor. In the MX formats each row of the last axis is padded to whole blocks of 32, and each block has a scale byte."""
    name = precision_name(precision)
    if not name.startswith("mx"):
        return math.prod(shape) * _BITS[name] // 8
    blocks = math.prod(shape[:-1]) * -(-shape[-1] // MX_BLOCK)
    return blocks * (MX_BLOCK * _BITS[name] // 8 + 1)


def bits_per_weight(precision: str) -> float:
    """Bits that one weight takes, scale included: 4.25 for mxfp4."""
    return tensor_bytes((MX_BLOCK,), precision) * 8 / MX_BLOCK


def accumulation_precision(precision: str) -> str:
    """What must not be narrow is kept in: fp64 in an fp64 model, else fp32."""
    return "fp64" if precision_name(precision) == "fp64" else "fp32"


def weight_bytes(config: ModelConfig, trunk: str = "bf16", experts: str | None = None) -> dict[str, int]:
    """Bytes of the weights by system: routed experts in the precision `experts` (None: as the trunk), what must be fp32 in fp32."""
    totals = dict.fromkeys(SYSTEMS, 0)
    for parameter in parameters(config):
        if parameter.island:
            precision = accumulation_precision(trunk)
        else:
            precision = experts if experts is not None and parameter.kind == "experts" else trunk
        totals[parameter.system] += tensor_bytes(parameter.shape, precision)
    return totals


def expert_bytes(config: ModelConfig, precision: str = "mxfp4") -> int:
    """Bytes of one routed expert: what a miss of the expert cache reads."""
    width, inner = config.moe_intermediate_size, config.expert_width
    return tensor_bytes((2 * width, inner), precision) + tensor_bytes((inner, width), precision)


def kda_state_bytes(config: ModelConfig, precision: str = "fp32") -> int:
    """Bytes of a sequence's recurrent states `[H, K, V]` over all KDA layers. Independent of its length."""
    return len(config.kda_layers) * tensor_bytes((config.kda_num_heads, config.kda_head_dim, config.kda_head_dim), precision)


def conv_tail_bytes(config: ModelConfig, precision: str = "bf16") -> int:
    """Bytes of a sequence's convolution tails: the last W − 1 inputs of q, k and v in each KDA layer. Independent of its length."""
    return len(config.kda_layers) * 3 * tensor_bytes((config.kda_width, config.kda_conv_size - 1), precision)


def latent_width(config: ModelConfig) -> int:
    """Values that an MLA layer remembers per token: the latent and the key part that all heads share."""
    return config.kv_lora_rank + config.qk_rope_head_dim


def latent_bytes_per_token(config: ModelConfig, precision: str = "bf16") -> int:
    """Bytes by which a sequence's memory grows with each token, over all MLA layers."""
    return len(config.mla_layers) * tensor_bytes((latent_width(config),), precision)


def state_bytes(config: ModelConfig, lengths: Iterable[int], precision: str = "bf16") -> int:
    """Bytes of a `DecoderState` holding sequences of these lengths, with latents and tails in `precision` and KDA states in fp32 (fp64
    when `precision` is fp64). Equal to its `nbytes`."""
    tokens = list(lengths)
    fixed = kda_state_bytes(config, accumulation_precision(precision)) + conv_tail_bytes(config, precision)
    return len(tokens) * fixed + sum(tokens) * latent_bytes_per_token(config, precision)
