"""The call that KDA makes to flash-linear-attention, against a stand-in for its two functions."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from openk3.ops.kda import kda_reference
from openk3.ops.kda_fla import fla_applies, kda_fla
from openk3.ops.segments import Segments
from tests.ops.kda_cases import RAGGED, distance, make_case


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Puts a `fla.ops.kda` in place that checks and records its arguments, and answers with the recurrence."""
    made: list[dict[str, Any]] = []

    def stand_in(name: str):
        def run(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            g: Tensor,
            beta: Tensor,
            scale: float | None = None,
            initial_state: Tensor | None = None,
            output_final_state: bool = False,
            cu_seqlens: Tensor | None = None,
        ) -> tuple[Tensor, Tensor]:
            assert output_final_state and cu_seqlens is not None and cu_seqlens.dtype == torch.int64
            _, T, H, K = q.shape
            assert q.shape == k.shape == g.shape == (1, T, H, K) and v.shape[:3] == beta.shape == (1, T, H)
            assert g.dtype == beta.dtype == torch.float32 and q.dtype == k.dtype == v.dtype
            assert all(t.is_contiguous() for t in (q, k, v, g, beta))
            lengths = cu_seqlens.diff()
            assert bool((lengths > 0).all()) and int(cu_seqlens[-1]) == T
            if initial_state is not None:
                assert initial_state.dtype == torch.float32 and initial_state.shape == (len(lengths), H, K, v.shape[3])
            made.append({"name": name, "offsets": cu_seqlens.tolist(), "scale": scale})
            o, final = kda_reference(q[0], k[0], v[0], g[0], beta[0], Segments.of(lengths), initial_state, scale=scale)
            return o[None], final

        return run

    module = ModuleType("fla.ops.kda")
    module.chunk_kda, module.fused_recurrent_kda = stand_in("chunk"), stand_in("recurrent")
    for name, value in (("fla", ModuleType("fla")), ("fla.ops", ModuleType("fla.ops")), ("fla.ops.kda", module)):
        monkeypatch.setitem(sys.modules, name, value)
    return made


@pytest.mark.parametrize("state", [True, False])
def test_a_ragged_batch_reaches_the_chunk_kernel_without_its_empty_sequences(calls: list[dict[str, Any]], state: bool) -> None:
    case = make_case(RAGGED, state=state)
    tensors = [t.float() for t in case.tensors]
    initial = tensors[5] if state else None
    o, final = kda_fla(*tensors[:5], case.segments, initial, lower_bound=-5.0)
    wanted_o, wanted_final = kda_reference(*tensors[:5], case.segments, initial)
    assert distance(o, wanted_o) <= 1e-6 and distance(final, wanted_final) <= 1e-6
    assert calls == [{"name": "chunk", "offsets": [0, 40, 57, 64, 65, 66, 136, 200, 263], "scale": 8**-0.5}]


def test_decode_takes_the_recurrent_kernel_and_training_does_not(calls: list[dict[str, Any]]) -> None:
    case = make_case([1, 0, 1])
    tensors = [t.float() for t in case.tensors]
    _, final = kda_fla(*tensors[:5], case.segments, tensors[5], scale=0.5)
    assert torch.equal(final[1], tensors[5][1])
    leaves = [t.clone().requires_grad_() for t in tensors]
    o, final = kda_fla(*leaves[:5], case.segments, leaves[5])
    o.sum().backward()
    assert [(call["name"], call["offsets"]) for call in calls] == [("recurrent", [0, 1, 2]), ("chunk", [0, 1, 2])]
    assert calls[0]["scale"] == 0.5
    assert leaves[5].grad is not None and not leaves[5].grad[1].any()


def test_bfloat16(calls: list[dict[str, Any]]) -> None:
    case = make_case([20])
    q, k, v = (t.bfloat16() for t in case.tensors[:3])
    o, final = kda_fla(q, k, v, case.g, case.beta, case.segments)
    assert o.dtype == torch.bfloat16 and final.dtype == torch.float32


def test_it_is_not_offered_on_a_cpu() -> None:
    assert not fla_applies(torch.zeros(4, 1, 8))
