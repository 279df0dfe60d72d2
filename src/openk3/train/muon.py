"""Per-Head Muon: momentum, orthogonalised block by block (Kimi K3 report §2.5; Muon at scale, arXiv 2502.16982).

A parameter is a stack of matrices that are orthogonalised apart from each other: one block for a plain matrix, one a head for query,
key and value projections, one an expert (gate and up separately) for stacked experts. Equal shapes of all parameters share one
batched Newton-Schulz iteration.

Not public for K3, chosen here: the Newton-Schulz coefficients and their number of steps, the momentum, and whether the update is
scaled by the shape of the head's block or of the whole matrix.

Letters: B blocks, n rows and m columns of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from openk3.train.optimizer_settings import Precision, RmsShape

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic that Muon was published with (Keller Jordan, 2024): singular values end near 1, between about 0.7 and 1.2, rather than at
it, in exchange for few steps."""

GRAM_MAX_STEPS = 6
"""Beyond it, rounding errors of a rank-deficient block's Gram matrix in fp32 could grow to the size of its entries."""


class BlockLayout(NamedTuple):
    """How the rows of a parameter (all dimensions but the last, flattened) divide: `times` a run of `parts` rows each."""

    times: int
    parts: tuple[int, ...]

    @staticmethod
    def whole(parameter: Tensor) -> BlockLayout:
        """A matrix as one block."""
        return BlockLayout(1, (parameter.shape[0],))

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Views `[times, part, m]` of `tensor`, one for each of `parts`."""
        return tensor.view(self.times, sum(self.parts), tensor.shape[-1]).split(self.parts, 1)


def newton_schulz(blocks: Tensor, steps: int = 5, dtype: torch.dtype | None = None) -> Tensor:
    """Bring the singular values of each of `blocks [B, n, m]` near 1 and keep its singular vectors; zero blocks stay zero.

    Computes in `dtype` (default: the input's), returns the input's dtype. With X scaled to Frobenius norm 1, `steps` times
    X ← aX + bAX + cA²X, where A = XXᵀ. In fp32 or wider, long blocks iterate on A alone: all factors are polynomials in the first A, so X
    enters only at both ends.
    """
    if blocks.dim() != 3:
        raise ValueError(f"blocks have shape [B, n, m], not {list(blocks.shape)}")
    wide = blocks.transpose(1, 2) if blocks.shape[1] > blocks.shape[2] else blocks
    rows, columns = wide.shape[1:]
    dtype = dtype or blocks.dtype
    # In units of n²: five products with X cost 10m + 5n, the Gram form 2m + 17n (rounding errors forbid it below fp32).
    gram = 8 * columns > 12 * rows and torch.finfo(dtype).bits >= 32 and 2 <= steps <= GRAM_MAX_STEPS
    out = (_through_gram if gram else _directly)(wide, steps, dtype).to(blocks.dtype)
    return out.transpose(1, 2) if wide is not blocks else out


def _directly(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    a, b, c = COEFFICIENTS
    x = (x / _safe(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True))).to(dtype)
    for _ in range(steps):
        gram = torch.bmm(x, x.transpose(1, 2))
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _through_gram(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    a, b, c = COEFFICIENTS
    x = x.to(dtype)
    gram = torch.bmm(x, x.transpose(1, 2))
    norm = _safe(gram.diagonal(dim1=1, dim2=2).sum(-1).sqrt()[:, None, None])
    gram /= norm * norm
    product: Tensor | None = None
    for step in range(steps):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=1, dim2=2).add_(a)
        product = factor / norm if product is None else torch.bmm(factor, product)
        if step < steps - 1:
            gram = torch.bmm(factor, torch.bmm(factor, gram))
    assert product is not None
    return torch.bmm(product, x)


def _safe(norm: Tensor) -> Tensor:
    # A block without gradient fades out instead of being blown up to full size.
    return norm + 1e-7


def iteration_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """The dtype Newton-Schulz runs in: `auto` is bfloat16 where the device multiplies bfloat16 matrices in hardware, else float32."""
    if precision != "auto":
        return torch.float32 if precision == "float32" else torch.bfloat16
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float32
    if device.type == "cpu" and torch.cpu.get_capabilities().get("amx_bf16", False):
        return torch.bfloat16
    return torch.float32


class _Piece(NamedTuple):
    """Some blocks of one parameter, `[B, n, m]` each, as views."""

    parameter: Tensor
    momentum: Tensor
    gradient: Tensor
    scale: float


class Muon:
    """Nesterov momentum, orthogonalised; update scaled to a root mean square of about `update_rms`; decoupled weight decay.

    `matrices` names each parameter (fp32 or float64) with its blocks. The scale is update_rms · √max(n, m), of the block's shape or, with
    `rms_shape="matrix"`, of the parameter's last two dimensions. At most about `workspace` elements are staged at once.
    """

    def __init__(
        self,
        matrices: Mapping[str, tuple[Tensor, BlockLayout]],
        *,
        momentum: float = 0.95,
        steps: int = 5,
        update_rms: float = 0.2,
        rms_shape: RmsShape = "block",
        precision: Precision = "auto",
        workspace: int = 1 << 20,
    ) -> None:
        self.matrices = dict(matrices)
        self.momentum, self.steps, self.update_rms, self.rms_shape = momentum, steps, update_rms, rms_shape
        self.precision: Precision = precision
        self.workspace = workspace
        self.buffers = {name: torch.zeros_like(matrix) for name, (matrix, _) in self.matrices.items()}

    @torch.no_grad()
    def step(self, lr: float, weight_decay: float) -> None:
        """Update every parameter that has a gradient; leave gradients as they are."""
        shapes: dict[tuple[int, int, torch.dtype, torch.device], list[_Piece]] = {}
        for name, (parameter, layout) in self.matrices.items():
            if parameter.grad is None:
                continue
            momentum = self.buffers[name]
            torch.add(parameter.grad, momentum, alpha=self.momentum, out=momentum)
            if weight_decay:
                parameter.mul_(1.0 - lr * weight_decay)
            views = zip(*(layout.split(t) for t in (parameter.detach(), momentum, parameter.grad.contiguous())), strict=True)
            for blocks, momenta, gradients in views:
                rows, columns = blocks.shape[1:]
                longest = max(rows, columns) if self.rms_shape == "block" else max(parameter.shape[-2:])
                piece = _Piece(blocks, momenta, gradients, self.update_rms * longest**0.5)
                key = (min(rows, columns), max(rows, columns), parameter.dtype, parameter.device)
                shapes.setdefault(key, []).append(piece)
        for (rows, columns, dtype, device), pieces in shapes.items():
            compute = dtype if dtype == torch.float64 else iteration_dtype(self.precision, device)
            for batch in _batches(pieces, max(1, self.workspace // (rows * columns))):
                self._update(batch, rows, columns, dtype, device, compute, lr)

    def _update(
        self, batch: list[_Piece], rows: int, columns: int, dtype: torch.dtype, device: torch.device, compute: torch.dtype, lr: float
    ) -> None:
        staged = torch.empty(sum(piece.parameter.shape[0] for piece in batch), rows, columns, dtype=dtype, device=device)
        for piece, slot in zip(batch, _slots(staged, batch), strict=True):
            torch.add(piece.gradient, piece.momentum, alpha=self.momentum, out=slot)
        update = newton_schulz(staged, self.steps, compute)
        for piece, slot in zip(batch, _slots(update, batch), strict=True):
            piece.parameter.add_(slot, alpha=-lr * piece.scale)


def _batches(pieces: list[_Piece], limit: int) -> Iterator[list[_Piece]]:
    """`pieces` in order, cut so that each batch holds at most `limit` blocks."""
    batch: list[_Piece] = []
    room = limit
    for piece in pieces:
        start, count = 0, piece.parameter.shape[0]
        while start < count:
            taken = min(room, count - start)
            cut = slice(start, start + taken)
            batch.append(_Piece(piece.parameter[cut], piece.momentum[cut], piece.gradient[cut], piece.scale))
            start, room = start + taken, room - taken
            if not room:
                yield batch
                batch, room = [], limit
    if batch:
        yield batch


def _slots(stack: Tensor, batch: list[_Piece]) -> list[Tensor]:
    """Views of `stack [B, n, m]`, one for each piece of the batch, turned to the piece's own orientation."""
    slots = stack.split([piece.parameter.shape[0] for piece in batch])
    return [slot if slot.shape == piece.parameter.shape else slot.transpose(1, 2) for slot, piece in zip(slots, batch, strict=True)]
