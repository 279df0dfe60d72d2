"""Newton-Schulz and Per-Head Muon against singular value decompositions and a plain loop in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from openk3.train import muon
from openk3.train.muon import BlockLayout, Muon, newton_schulz


def _by_svd(block: Tensor, steps: int = 5) -> Tensor:
    """The iteration on singular values alone: σ ← 3.4445σ − 4.7750σ³ + 2.0315σ⁵, from Frobenius norm 1."""
    left, values, right = torch.linalg.svd(block.double(), full_matrices=False)
    values = values / (values.square().sum().sqrt() + 1e-7)
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left * values @ right


def _blocks(count: int, rows: int, columns: int, rank: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    if rank is None:
        return torch.randn(count, rows, columns, generator=generator, dtype=torch.float64)
    left, right = (torch.randn(count, *shape, generator=generator, dtype=torch.float64) for shape in ((rows, rank), (rank, columns)))
    return left @ right


SHAPES = [(1, 1), (1, 7), (7, 1), (8, 8), (12, 16), (16, 12), (8, 40), (40, 8), (33, 130)]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
@pytest.mark.parametrize("steps", [1, 5, 9])
def test_newton_schulz_moves_singular_values_only(rows: int, columns: int, steps: int) -> None:
    blocks = _blocks(3, rows, columns)
    result = newton_schulz(blocks, steps)
    expected = torch.stack([_by_svd(block, steps) for block in blocks])
    assert result.shape == blocks.shape
    assert (result - expected).abs().max() < 1e-10


@pytest.mark.parametrize(("rows", "columns"), [(48, 48), (32, 96), (96, 32)])
@pytest.mark.parametrize("rank", [None, 3])
def test_newton_schulz_in_single_precision(rows: int, columns: int, rank: int | None) -> None:
    blocks = _blocks(2, rows, columns, rank)
    expected = torch.stack([_by_svd(block) for block in blocks])
    result = newton_schulz(blocks.float())
    assert result.dtype == torch.float32
    assert (result - expected).abs().max() < 1e-4


def test_newton_schulz_in_bfloat16_stays_near_orthogonal() -> None:
    result = newton_schulz(_blocks(2, 32, 96).float(), dtype=torch.bfloat16)
    assert result.dtype == torch.float32
    values = torch.linalg.svdvals(result)
    assert 0.6 < values.min() and values.max() < 1.3


def test_singular_values_end_near_one() -> None:
    values = torch.linalg.svdvals(newton_schulz(_blocks(4, 64, 192)))
    assert 0.65 < values.min() and values.max() < 1.2


def test_scale_of_a_block_does_not_matter_until_it_vanishes() -> None:
    block = _blocks(1, 16, 48)
    assert (newton_schulz(block * 1e6) - newton_schulz(block * 1e-1)).abs().max() < 1e-4
    assert newton_schulz(block * 1e-12).abs().max() < 1e-1
    assert torch.equal(newton_schulz(torch.zeros(2, 16, 48)), torch.zeros(2, 16, 48))
    assert torch.equal(newton_schulz(torch.zeros(2, 48, 48)), torch.zeros(2, 48, 48))


@pytest.mark.parametrize("steps", [6, 7, 12])
def test_rank_deficient_blocks_stay_finite_for_many_steps(steps: int) -> None:
    result = newton_schulz(_blocks(4, 96, 384, rank=2).float(), steps)
    assert result.abs().max() < 2.0


def test_newton_schulz_of_nothing_and_of_a_wrong_shape() -> None:
    assert newton_schulz(torch.zeros(0, 4, 12)).shape == (0, 4, 12)
    with pytest.raises(ValueError, match=r"\[B, n, m\]"):
        newton_schulz(torch.zeros(4, 12))


def test_layouts_cut_rows_of_heads_parts_and_experts() -> None:
    rows = torch.arange(12.0)[:, None].expand(12, 2).contiguous()
    keys, values = BlockLayout(2, (4, 2)).split(rows)
    assert keys[..., 0].tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert values[..., 0].tolist() == [[4, 5], [10, 11]]
    (whole,) = BlockLayout.whole(rows).split(rows)
    assert whole.shape == (1, 12, 2)
    gate, up = BlockLayout(3, (2, 2)).split(rows.view(3, 4, 2))
    assert gate[..., 0].tolist() == [[0, 1], [4, 5], [8, 9]]
    assert up[..., 0].tolist() == [[2, 3], [6, 7], [10, 11]]


def _matrices() -> dict[str, tuple[Tensor, BlockLayout]]:
    generator = torch.Generator().manual_seed(7)

    def make(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    return {
        "plain": (make(6, 20), BlockLayout(1, (6,))),
        "turned": (make(20, 6), BlockLayout(1, (20,))),
        "heads": (make(4 * 6, 20), BlockLayout(4, (6,))),
        "keys_and_values": (make(3 * (20 + 5), 6), BlockLayout(3, (20, 5))),
        "experts": (make(5, 2 * 6, 20), BlockLayout(5, (6, 6))),
    }


def _slices(parameter: Tensor, layout: BlockLayout) -> list[Tensor]:
    flat, blocks, row = parameter.reshape(-1, parameter.shape[-1]), [], 0
    for _ in range(layout.times):
        for part in layout.parts:
            blocks.append(flat[row : row + part])
            row += part
    assert row == flat.shape[0]
    return blocks


@pytest.mark.parametrize("workspace", [1, 500, 1 << 23])
@pytest.mark.parametrize("rms_shape", ["block", "matrix"])
def test_three_steps_equal_a_plain_loop(workspace: int, rms_shape: muon.RmsShape) -> None:
    matrices = _matrices()
    expected = {name: matrix.detach().clone() for name, (matrix, _) in matrices.items()}
    momenta = {name: torch.zeros_like(matrix) for name, matrix in expected.items()}
    optimizer = Muon(matrices, momentum=0.9, update_rms=0.3, rms_shape=rms_shape, workspace=workspace)
    for step in range(3):
        lr = 0.01 * (step + 1)
        for name, (matrix, layout) in matrices.items():
            gradient = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            matrix.grad = gradient
            momenta[name] = 0.9 * momenta[name] + gradient
            pairs = zip(_slices(expected[name], layout), _slices(gradient + 0.9 * momenta[name], layout), strict=True)
            for block, direction in pairs:
                longest = max(block.shape) if rms_shape == "block" else max(matrix.shape[-2:])
                block.copy_(block * (1 - lr * 0.1) - lr * 0.3 * math.sqrt(longest) * _by_svd(direction))
        optimizer.step(lr, 0.1)
    for name, (matrix, _) in matrices.items():
        assert (matrix - expected[name]).abs().max() < 1e-10, name
        assert (optimizer.buffers[name] - momenta[name]).abs().max() < 1e-13, name


def test_a_loud_head_does_not_quieten_the_others() -> None:
    updates = []
    for layout in (BlockLayout(4, (6,)), BlockLayout(1, (24,))):
        for loudness in (1.0, 1000.0):
            weight = torch.zeros(24, 20, dtype=torch.float64, requires_grad=True)
            gradient = torch.randn(24, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            gradient[:6] *= loudness
            weight.grad = gradient
            Muon({"w": (weight, layout)}).step(1.0, 0.0)
            updates.append(weight.detach()[6:])
    per_head, per_head_loud, whole, whole_loud = updates
    assert (per_head - per_head_loud).abs().max() < 1e-10
    assert whole_loud.norm() < 0.8 * whole.norm()


def test_update_has_the_promised_size() -> None:
    weight = torch.zeros(512, 64, requires_grad=True)
    weight.grad = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    Muon({"w": (weight, BlockLayout(8, (64,)))}).step(0.5, 0.0)
    assert float(weight.detach().square().mean().sqrt()) == pytest.approx(0.5 * 0.2, rel=0.2)
    weight.detach().zero_()
    Muon({"w": (weight, BlockLayout(8, (64,)))}, rms_shape="matrix").step(0.5, 0.0)
    assert float(weight.detach().square().mean().sqrt()) == pytest.approx(0.5 * 0.2 * math.sqrt(8), rel=0.2)


def test_parameters_without_gradient_stay_as_they_are() -> None:
    matrices = _matrices()
    before = {name: matrix.detach().clone() for name, (matrix, _) in matrices.items()}
    matrices["heads"][0].grad = torch.ones(24, 20, dtype=torch.float64)
    optimizer = Muon(matrices)
    optimizer.step(0.1, 0.1)
    changed = {name for name, (matrix, _) in matrices.items() if not torch.equal(matrix, before[name])}
    assert changed == {"heads"}


def test_gradients_may_lie_in_any_order_and_are_kept() -> None:
    weights = [torch.ones(24, 20, requires_grad=True) for _ in range(2)]
    gradient = torch.randn(20, 24, generator=torch.Generator().manual_seed(1)).t()
    weights[0].grad = gradient.clone(memory_format=torch.preserve_format)
    weights[1].grad = gradient.contiguous()
    for weight in weights:
        Muon({"w": (weight, BlockLayout(4, (6,)))}).step(0.1, 0.1)
    assert torch.equal(*weights)
    assert weights[0].grad is not None and torch.equal(weights[0].grad, gradient)


def test_precision_of_the_iteration() -> None:
    cpu = torch.device("cpu")
    assert muon.iteration_dtype("float32", cpu) == torch.float32
    assert muon.iteration_dtype("bfloat16", cpu) == torch.bfloat16
    matrix_unit = torch.cpu.get_capabilities().get("amx_bf16", False)
    assert muon.iteration_dtype("auto", cpu) == (torch.bfloat16 if matrix_unit else torch.float32)
