"""How the tests of ops hold one form against another: outputs and every gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tests.support import relative


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers that depend only on the seed and the shape; drawn in float64, then cast."""
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def value_and_gradients(op: Callable[..., Tensor], *inputs: Tensor, upstream: torch.dtype | None = None) -> list[Tensor]:
    """The op's output and its gradient in each input under one fixed random upstream gradient; zeros where no gradient came.

    The upstream gradient is rounded to `upstream` (by default the output's dtype) before it is given in the output's dtype.
    """
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = op(*leaves)
    gradient = normal(*out.shape, seed=99, dtype=upstream or out.dtype).to(out.dtype)
    grads = torch.autograd.grad(out, leaves, gradient, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True))]


def assert_agree(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Each pair agrees in shape, and within `tolerance` of the expected one's root mean square."""
    for position, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert relative(a, e) <= tolerance, f"{position}: {relative(a, e)} > {tolerance}"


def assert_same_op(op: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor], tolerance: float) -> None:
    """`op` gives what `plain` gives, gradients too. For bf16 inputs `plain` runs on the same numbers in fp32."""
    dtype = torch.bfloat16 if any(tensor.dtype == torch.bfloat16 for tensor in inputs) else None
    actual = value_and_gradients(op, *inputs, upstream=dtype)
    for gradient, given in zip(actual[1:], inputs, strict=True):
        assert gradient.dtype == given.dtype
    assert_agree(actual, value_and_gradients(plain, *(t if dtype is None else t.float() for t in inputs), upstream=dtype), tolerance)


def saved_bytes(op: Callable[[], Tensor]) -> int:
    """Bytes of the distinct storages that the op's graph keeps for its backward."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        op()
    return sum(kept.values())


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
