"""Microscaling formats: MXFP4 (E2M1) and MXFP8 (E4M3), blocks of 32 along the last axis, one power-of-two scale (E8M0) a block.

OCP Microscaling Formats v1.0 (arXiv 2310.10537) fixes elements and scales; which power of two a block gets is a rule, and there are three:

- `even`: the largest magnitude, rounded to the element's grid (a tie goes to the even code), must be representable. For MXFP4 it is what
  compressed-tensors writes: 2^(floor(log2 amax) - 2), one more from a mantissa of 1.75 on. At the very top of fp32's range that
  rounds up to 2^128, which MXFP4 holds and fp32 reads back as infinity.
- `floor`: OCP's own, 2^(floor(log2 amax) - emax): values above the largest element saturate.
- `ceil`: the smallest power of two with which nothing saturates.

Bytes: MXFP4 packs two codes, the even column in the low nibble; scale byte e means 2^(e - 127), 255 means NaN, a zero block has 0.
A block that holds an infinity or a NaN reads back as NaN, whole: trouble stays visible instead of saturating.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from openk3.ops.precision import accumulation_dtype

Format = Literal["mxfp4", "mxfp8"]
ScaleRule = Literal["even", "floor", "ceil"]

BLOCK = 32
SCALE_BIAS = 127
NAN_SCALE = 255
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Element:
    """A small floating-point format without infinities."""

    largest: float
    top_exponent: int
    """Exponent of the largest power of two: OCP's emax."""
    mantissa_bits: int
    lowest_exponent: int
    """Exponent of the smallest normal number; below it the grid stays as fine as there."""
    bump_even: float
    """Mantissa from which `even` takes the next power of two."""
    bump_even_at_tie: bool
    bump_ceil: float
    """Mantissa above which `ceil` takes the next power of two."""


ELEMENTS: dict[str, Element] = {
    # 7 lies half-way between 6 and the next step 8, whose code is even; 464 half-way between 448 and 480, where 448 is even.
    "mxfp4": Element(6.0, 2, 1, 0, 1.75, True, 1.5),
    "mxfp8": Element(448.0, 8, 3, -6, 1.8125, False, 1.75),
}


@dataclass(frozen=True)
class MXTensor:
    """A tensor in a microscaling format, of last axis `width`."""

    format: Format
    packed: Tensor
    """MXFP4: uint8 `[..., blocks · 16]`; MXFP8: float8_e4m3fn `[..., blocks · 32]`."""
    scale: Tensor
    """uint8 `[..., blocks]`, or float8_e8m0fnu as read from a file."""
    width: int

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The values `[..., width]`; exact in bfloat16 but for MXFP8's subnormal products, and in fp32 always."""
        acc = torch.promote_types(dtype, torch.float32)
        codes = _unpack(self.packed, acc) if self.format == "mxfp4" else self.packed.to(acc)
        blocks = codes.view(*codes.shape[:-1], codes.shape[-1] // BLOCK, BLOCK) * scale_value(self.scale, acc)[..., None]
        return blocks.flatten(-2)[..., : self.width].to(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of elements and scales."""
        return self.packed.nbytes + self.scale.nbytes


def quantize(x: Tensor, format: Format, scale_rule: ScaleRule = "even") -> MXTensor:
    """`x [..., width]` in `format`. A last axis that is not a multiple of 32 is padded with zeros, which `dequantize` slices off.

    Raises ValueError for an unknown format or rule, a scalar, or a dtype that is not floating point.
    """
    blocks, byte = _blocks_and_scales(x, format, scale_rule)
    scaled = _round(_scaled(blocks, byte), ELEMENTS[format])
    if format == "mxfp4":
        packed = _pack(scaled.flatten(-2), x, blocks)
    else:
        packed = scaled.flatten(-2).to(torch.float8_e4m3fn)
    return MXTensor(format, packed, byte, x.shape[-1])


def fake_quantize(x: Tensor, format: Format, scale_rule: ScaleRule = "even") -> Tensor:
    """`quantize(x).dequantize(x.dtype)`, bit for bit, with a straight-through gradient: as if nothing had been rounded."""
    return _FakeQuantize.apply(x, format, scale_rule)


def scale_value(scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """2^(byte - 127) for scale bytes (uint8, or float8_e8m0fnu): 2^-127 for 0, NaN for 255."""
    byte = scale.view(torch.uint8) if scale.dtype == torch.float8_e8m0fnu else scale
    if byte.dtype != torch.uint8:
        raise ValueError(f"block scales are uint8 or float8_e8m0fnu, not {scale.dtype}")
    value = _power_of_two(byte.to(torch.int32) - SCALE_BIAS, dtype)
    return value.masked_fill_(byte == NAN_SCALE, float("nan"))


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, format: Format, scale_rule: ScaleRule) -> Tensor:
        blocks, byte = _blocks_and_scales(x, format, scale_rule)
        rounded = _round(_scaled(blocks, byte), ELEMENTS[format])
        # A negative zero among MXFP4 codes reads back as -0, as the packed form does; the sign of an exact zero is dropped there too.
        value = rounded.mul_(scale_value(byte, rounded.dtype)[..., None])
        if format == "mxfp4":
            value.masked_fill_(blocks == 0, 0.0).masked_fill_((byte == NAN_SCALE)[..., None], float("nan"))
        return value.flatten(-2)[..., : x.shape[-1]].to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


def _blocks_and_scales(x: Tensor, format: Format, scale_rule: ScaleRule) -> tuple[Tensor, Tensor]:
    """`x` in blocks `[..., n, 32]` in at least fp32, and each block's scale byte `[..., n]`."""
    if format not in ELEMENTS:
        raise ValueError(f"the formats are {', '.join(ELEMENTS)}, not {format!r}")
    if x.dim() == 0 or not x.dtype.is_floating_point:
        raise ValueError(f"a floating-point tensor with at least one axis is quantized, not {x.dtype} {list(x.shape)}")
    blocks = x.detach().to(accumulation_dtype(x))
    padding = -x.shape[-1] % BLOCK
    if padding:
        blocks = torch.nn.functional.pad(blocks, (0, padding))
    blocks = blocks.reshape(*x.shape[:-1], (x.shape[-1] + padding) // BLOCK, BLOCK)
    return blocks, _scale_byte(blocks.abs().amax(dim=-1), ELEMENTS[format], scale_rule)


def _scale_byte(amax: Tensor, element: Element, scale_rule: ScaleRule) -> Tensor:
    half_mantissa, exponent = torch.frexp(amax)  # amax = m · 2^e with m in [1/2, 1)
    mantissa = half_mantissa * 2
    if scale_rule == "even":
        bump = mantissa >= element.bump_even if element.bump_even_at_tie else mantissa > element.bump_even
    elif scale_rule == "ceil":
        bump = mantissa > element.bump_ceil
    elif scale_rule == "floor":
        bump = torch.zeros_like(mantissa, dtype=torch.bool)
    else:
        raise ValueError(f"the scale rules are even, floor and ceil, not {scale_rule!r}")
    byte = (exponent.to(torch.int32) - 1 + bump.to(torch.int32) - element.top_exponent + SCALE_BIAS).clamp_(0, NAN_SCALE - 1)
    byte.masked_fill_(amax == 0, 0).masked_fill_(~amax.isfinite(), NAN_SCALE)
    return byte.to(torch.uint8)


def _scaled(blocks: Tensor, byte: Tensor) -> Tensor:
    """Blocks over their scale. Multiplying by 2^(127 - byte) is exact: at byte 0 it is 2^127, still a number."""
    return blocks * _power_of_two(SCALE_BIAS - byte.to(torch.int32), blocks.dtype)[..., None]


def _power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.ldexp(torch.ones(exponent.shape, dtype=dtype, device=exponent.device), exponent)


def _round(scaled: Tensor, element: Element) -> Tensor:
    """Nearest element, ties to the even code, saturating. Overwrites `scaled`."""
    scaled.clamp_(-element.largest, element.largest)
    # The step of the grid at each value: its power of two, not below the smallest normal one, over the mantissa's resolution.
    step = _power_below(scaled).clamp_min_(2.0**element.lowest_exponent).mul_(2.0**-element.mantissa_bits)
    return scaled.div_(step).round_().mul_(step)


def _power_below(x: Tensor) -> Tensor:
    """2^floor(log2 |x|), 0 where x is 0 (or, in fp32 bits, subnormal)."""
    if x.dtype == torch.float64:
        return (x.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def _pack(values: Tensor, x: Tensor, blocks: Tensor) -> Tensor:
    """E2M1 values as codes, two a byte. A negative value that rounds to zero keeps its sign; an exact zero has none."""
    magnitude = values.abs()
    # 0, .5, 1, 1.5, 2 are codes 0..4 at twice their value; 3, 4, 6 are 5, 6, 7.
    code = torch.where(magnitude <= 2, magnitude * 2, 2 + magnitude - (magnitude > 4).to(values.dtype))
    code = code.nan_to_num_(0.0).to(torch.uint8)
    code |= (blocks.flatten(-2) < 0).to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4)


def _unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Packed bytes `[..., n]` as values `[..., 2n]`."""
    if packed.dtype != torch.uint8:
        raise ValueError(f"packed MXFP4 is uint8, not {packed.dtype}")
    codes = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=dtype, device=packed.device)
    pairs = torch.stack([codes.repeat(16), codes.repeat_interleave(16)], dim=1)
    return pairs[packed.long()].flatten(-2)
