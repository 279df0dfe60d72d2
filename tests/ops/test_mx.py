"""MXFP4 and MXFP8 against bytes that compressed-tensors wrote, hand-made blocks, and exact arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from openk3.ops.mx import ELEMENTS, MXTensor, fake_quantize, quantize, scale_value
from tests.support import oracle_json, oracle_tensors

CASES = sorted(oracle_json("mxfp4_vectors"))
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def vector(name: str) -> Tensor:
    return oracle_tensors("mxfp4_vectors")[name]


@pytest.mark.parametrize("case", [case for case in CASES if not case.startswith("decode")])
def test_bytes_are_those_of_compressed_tensors(case: str) -> None:
    q = quantize(vector(f"{case}.weight"), "mxfp4")
    assert torch.equal(q.scale, vector(f"{case}.weight_scale"))
    assert torch.equal(q.packed, vector(f"{case}.weight_packed"))


@pytest.mark.parametrize("case", CASES)
def test_decoded_values(case: str) -> None:
    packed, scale = vector(f"{case}.weight_packed"), vector(f"{case}.weight_scale")
    q = MXTensor("mxfp4", packed, scale, packed.shape[-1] * 2)
    sound = (scale != 255).all(dim=-1)  # compressed-tensors reads 255 as 2^128; OCP and we as NaN
    assert torch.equal(q.dequantize(torch.bfloat16)[sound], vector(f"{case}.dequant_bf16")[sound])
    assert bool(q.dequantize(torch.bfloat16)[~sound].isnan().all())
    if f"{case}.dequant_f32" in oracle_tensors("mxfp4_vectors"):
        assert torch.equal(q.dequantize(torch.float32)[sound], vector(f"{case}.dequant_f32")[sound])


def test_all_256_scale_codes() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = scale_value(codes, torch.float64)
    assert bool(values[255].isnan())
    assert values[:255].tolist() == [2.0 ** (e - 127) for e in range(255)]
    single = scale_value(codes)
    assert float(single[0]) == 2.0**-127 and float(single[134]) == 128.0
    native = codes.view(torch.float8_e8m0fnu)
    assert torch.equal(single[:255], native.float()[:255]) and bool(native.float()[255].isnan())
    assert torch.equal(scale_value(native)[:255], single[:255])
    with pytest.raises(ValueError, match="uint8"):
        scale_value(codes.float())


@pytest.mark.parametrize("scale", [0, 1, 126, 127, 128, 254])
def test_every_code_under_extreme_scales(scale: int) -> None:
    codes = list(range(16)) * 2
    packed = torch.tensor([[codes[i] | codes[i + 1] << 4 for i in range(0, 32, 2)]], dtype=torch.uint8)
    q = MXTensor("mxfp4", packed, torch.tensor([[scale]], dtype=torch.uint8), 32)
    expected = [(-1 if code & 8 else 1) * E2M1[code & 7] * 2.0 ** (scale - 127) for code in codes]
    assert q.dequantize(torch.float64)[0].tolist() == expected


def test_a_ramp_pins_the_nibble_order() -> None:
    ramp = torch.tensor([E2M1[i % 8] for i in range(32)])
    packed = quantize(ramp, "mxfp4").packed
    assert packed.tolist() == [0x10, 0x32, 0x54, 0x76] * 4


@pytest.mark.parametrize(("rule", "largest"), [("floor", 6.0), ("even", 8.0), ("ceil", 8.0)])
def test_what_becomes_of_7_9_in_mxfp4(rule: str, largest: float) -> None:
    assert float(quantize(torch.full((32,), 7.9), "mxfp4", rule).dequantize(torch.float32)[0]) == largest  # type: ignore[arg-type]


@pytest.mark.parametrize(("rule", "value"), [("floor", 896.0), ("even", 960.0), ("ceil", 960.0)])
def test_what_becomes_of_957_in_mxfp8(rule: str, value: float) -> None:
    assert float(quantize(torch.full((32,), 957.0), "mxfp8", rule).dequantize(torch.float32)[0]) == value  # type: ignore[arg-type]


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("rule", ["even", "floor", "ceil"])
def test_rounding_is_to_the_nearest_representable_value(format: str, rule: str) -> None:
    element = ELEMENTS[format]
    if format == "mxfp4":
        grid = torch.tensor(E2M1, dtype=torch.float64)
    else:
        grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    x = torch.randn(200, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2.0 ** torch.randint(-20, 20, (200, 1))
    q = quantize(x, format, rule)  # type: ignore[arg-type]
    scale = scale_value(q.scale, torch.float64).repeat_interleave(32, dim=1)
    wanted = (x / scale).abs().clamp(max=element.largest)
    nearest = (wanted[..., None] - grid).abs().amin(dim=-1)
    assert torch.equal((q.dequantize(torch.float64) / scale).abs().sub(wanted).abs(), nearest)
    if rule != "floor":
        worst_case = 7.0 if format == "mxfp4" else 464.0
        assert float((x / scale).abs().max()) <= (element.largest if rule == "ceil" else worst_case)


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_blocks_at_the_edges(format: str, dtype: torch.dtype) -> None:
    smallest = torch.finfo(dtype).smallest_normal
    rows = torch.zeros(7, 64, dtype=dtype)
    rows[1] = 1e-10
    rows[2, 5] = 3.0
    rows[3, 40] = float("inf")
    rows[4, 0] = float("nan")
    rows[5] = torch.finfo(dtype).max
    rows[6] = smallest
    back = quantize(rows, format).dequantize(dtype)  # type: ignore[arg-type]
    assert not back[0].any()
    assert bool(((back[1] - 1e-10).abs() <= 0.26e-10).all())
    assert float(back[2, 5]) == 3.0 and int((back[2] != 0).sum()) == 1
    assert bool(back[3, 32:].isnan().all()) and not back[3, :32].any(), "only the block that holds it is lost"
    assert bool(back[4, :32].isnan().all()) and not back[4, 32:].any()
    if dtype == torch.float32 and format == "mxfp4":
        assert quantize(rows[5], "mxfp4").dequantize(torch.float64).tolist() == [2.0**128] * 64
        assert bool(quantize(rows[5], "mxfp4", "floor").dequantize(dtype).isfinite().all())
    assert bool(back[6].isfinite().all())


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [1, 31, 32, 33, 96])
def test_fake_quantization_is_what_the_packed_form_reads_back(format: str, dtype: torch.dtype, width: int) -> None:
    x = torch.randn(9, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    x[0] = 0
    x[1, 0] = -0.0
    x[2] *= 1e-3
    x.requires_grad_(True)
    fake = fake_quantize(x, format)  # type: ignore[arg-type]
    back = quantize(x, format).dequantize(dtype)  # type: ignore[arg-type]
    assert fake.shape == back.shape == x.shape
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}[dtype]
    assert torch.equal(fake.detach().view(bits), back.view(bits)), "signs of zero included"
    upstream = torch.randn(9, width).to(dtype)
    fake.backward(upstream)
    assert torch.equal(x.grad, upstream)


def test_what_is_stored() -> None:
    q = quantize(torch.randn(3, 5, 64), "mxfp4")
    assert q.packed.shape == (3, 5, 32) and q.scale.shape == (3, 5, 2) and q.nbytes == 15 * 34
    q = quantize(torch.randn(3, 33), "mxfp8")
    assert q.packed.shape == (3, 64) and q.packed.dtype == torch.float8_e4m3fn and q.scale.shape == (3, 2)
    for bad in (
        lambda: quantize(torch.ones(3), "mxfp6"),
        lambda: quantize(torch.ones(3), "mxfp4", "up"),
        lambda: quantize(torch.ones(3).int(), "mxfp4"),
    ):  # type: ignore[arg-type]
        with pytest.raises(ValueError):
            bad()
    assert quantize(torch.ones(0, 32), "mxfp4").dequantize().shape == (0, 32)
