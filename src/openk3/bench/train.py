"""`openk3 bench train`: a training step of a Kimi-Linear of 29 M parameters, against transformers' `KimiLinearForCausalLM`.

The same sizes and the same 1024 tokens on both sides. `step` is forward + backward without the optimizer, each side in its better
precision; `optimizer` is the optimizer's share of a whole step of ours.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from openk3.accounting import training_flops
from openk3.bench.contestant import Contestant, Spec, require
from openk3.bench.race import Lane, matrix_rate
from openk3.bench.row import Row, median
from openk3.bench.session import Peer, Session
from openk3.config import ModelConfig

TOKENS = 1024
TRANSFORMERS = "5.24"
_RUNS = 3
_MLA_LAYERS = (3, 7)

_PEER_NOTE = "KDA and its convolution are the plain-torch forms that run where their GPU kernels do not; not tuned for CPUs"


def model_config() -> ModelConfig:
    """The model that both sides train: 29.0 M parameters."""
    return ModelConfig(
        family="kimi_linear",
        vocab_size=8192,
        hidden_size=384,
        num_layers=8,
        mla_layers=_MLA_LAYERS,
        num_heads=4,
        q_lora_rank=None,
        kv_lora_rank=128,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        mla_output_gate=False,
        kda_num_heads=4,
        kda_head_dim=128,
        kda_conv_size=4,
        kda_full_rank_gate=False,
        kda_gate_lower_bound=None,
        intermediate_size=1024,
        activation="silu",
        num_experts=16,
        experts_per_token=4,
        num_shared_experts=2,
        moe_intermediate_size=96,
        first_dense_layers=1,
        router_activation="sigmoid",
        renormalize=True,
        routed_scaling_factor=2.446,
        attn_res_block_size=None,
    )


def measure(session: Session) -> Iterator[Row]:
    """The rows of this benchmark: `step` against transformers, then `optimizer`."""
    yield _step(session)
    yield _optimizer(session)


def _step(session: Session) -> Row:
    ours = {f"ours {name}": _ours(session, name) for name in _our_precisions(session.device)}
    arguments = {"device": session.device}
    # Without bf16 in hardware a bf16 step of theirs takes minutes and can only be the worse of their two.
    theirs = {
        f"transformers {name}": Spec(f"{__name__}:transformers_step", {**arguments, "precision": name})
        for name in _our_precisions(session.device)
    }
    products = {f"matmul {name}": _matmul(session, name) for name in _our_precisions(session.device)}
    lanes = session.race("train step", {**ours, **theirs, **products}, runs=_RUNS, profiled="ours fp32")
    mine, peer_name = _fastest(lanes, ours), _fastest(lanes, theirs)
    lane, peer_lane = lanes[mine], lanes[peer_name]
    precision = mine.removeprefix("ours ")
    rate, speed = matrix_rate(lanes[f"matmul {precision}"]), median(_speeds(lane))
    flops = training_flops(model_config(), TOKENS)
    note = _PEER_NOTE if session.device == "cpu" else "with the GPU kernels that are installed"
    return session.row(
        name="train",
        case="step",
        unit="tokens/s",
        phase="training",
        context=TOKENS,
        batch=1,
        precision=precision,
        scope="end-to-end",
        samples=_speeds(lane),
        peer=Peer("transformers", theirs[peer_name], session.device == "cuda", f"{note}; {peer_name.removeprefix('transformers ')}"),
        peer_lane=peer_lane,
        peer_samples=_speeds(peer_lane),
        lower_is_better=False,
        limit_share=None if speed is None or rate is None else flops / TOKENS * speed / rate,
        error=lane.error,
        detail={
            "flops_per_step": flops,
            "flops_formula": "openk3.accounting.training_flops",
            "matrix_flops_per_second": rate,
            "contestants": {name: _contestant_detail(lanes[name]) for name in (*ours, *theirs)},
            "profile": lanes["ours fp32"].profile,
            "ours_by_threads": _other_threads(session),
        },
    )


def _optimizer(session: Session) -> Row:
    spec = Spec(f"{__name__}:whole_step", {"precision": "fp32", "device": session.device})
    lane = session.race("train optimizer", {"ours": spec}, runs=5, profiled="ours")["ours"]
    shares = [part / whole for part, whole in zip(lane.parts.get("optimizer", []), lane.seconds, strict=True)]
    return session.row(
        name="train",
        case="optimizer",
        unit="share",
        phase="training",
        context=TOKENS,
        batch=1,
        precision="fp32",
        scope="end-to-end",
        samples=shares,
        lower_is_better=True,
        error=lane.error,
        detail={
            "of": "a whole step: forward, backward, clipping, optimizer, balancing",
            "seconds": lane.seconds,
            "parts_seconds": lane.parts,
            "memory": lane.memory,
            "facts": lane.facts,
            "profile": lane.profile,
        },
    )


def _ours(session: Session, precision: str) -> Spec:
    return Spec(f"{__name__}:our_step", {"precision": precision, "device": session.device})


def _matmul(session: Session, precision: str) -> Spec:
    return Spec("openk3.bench.machine:matmul", {"dtype": {"fp32": "float32", "bf16": "bfloat16"}[precision], "device": session.device})


def _our_precisions(device: str) -> list[str]:
    return ["fp32", "bf16"] if device == "cuda" or has_fast_bf16() else ["fp32"]


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 matrices in hardware."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _fastest(lanes: dict[str, Lane], names: dict[str, Spec]) -> str:
    return min(names, key=lambda name: median(lanes[name].seconds) or math.inf)


def _speeds(lane: Lane) -> list[float]:
    return [TOKENS / seconds for seconds in lane.seconds]


def _contestant_detail(lane: Lane) -> dict[str, Any]:
    failed = {"error": lane.error} if lane.error else {}
    return {"tokens_per_second": _speeds(lane), "version": lane.version, "memory": lane.memory, "facts": lane.facts, **failed}


def _other_threads(session: Session) -> dict[str, Any]:
    threads = session.other_threads()
    if threads is None:
        return {}
    lane = session.race(f"train step, {threads} thread", {"ours": _ours(session, "fp32")}, runs=3, threads=threads)["ours"]
    return {str(threads): {"median": median(_speeds(lane)), "samples": _speeds(lane), **({"error": lane.error} if lane.error else {})}}


# What the worker processes build.


def _tokens(device: str) -> Tensor:
    return torch.randint(0, model_config().vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(0)).to(device)


def _precision(precision: str, device: str) -> Callable[[], AbstractContextManager[Any]]:
    if precision == "fp32":
        return nullcontext
    return lambda: torch.autocast(device, dtype=torch.bfloat16)


def _our_parts(precision: str, device: str) -> tuple[Any, Callable[[Any], Tensor]]:
    """The model, and a function of a routing log that runs one forward and backward and returns the loss."""
    from openk3.model.decoder import Decoder
    from openk3.ops.segments import Segments

    model = Decoder(model_config(), generator=torch.Generator().manual_seed(0)).to(device).train()
    tokens = _tokens(device)
    # The peer shifts its labels likewise: every token but the last has a target.
    targets = torch.cat([tokens[1:], tokens.new_tensor([-100])])
    segments = Segments.of([TOKENS])
    autocast = _precision(precision, device)

    def forward_backward(routing: Any) -> Tensor:
        with autocast():
            total = model.loss(tokens, segments, targets, routing=routing).total
        loss: Tensor = total / (TOKENS - 1)
        loss.backward()
        return loss.detach()

    return model, forward_backward


def our_step(*, precision: str, device: str) -> Contestant:
    """Forward and backward of our model; bf16 is autocast, as `openk3 train` does it."""
    from openk3 import __version__

    model, forward_backward = _our_parts(precision, device)
    facts: dict[str, Any] = {"parameters": sum(parameter.numel() for parameter in model.parameters())}

    def run() -> None:
        facts["loss"] = float(forward_backward(None))
        model.zero_grad(set_to_none=True)

    return Contestant(run=run, version=f"openk3 {__version__}", facts=facts)


def transformers_step(*, precision: str, device: str) -> Contestant:
    """Forward and backward of transformers' Kimi-Linear with weights in `precision`."""
    version = require("transformers", TRANSFORMERS)
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    ours = model_config()
    config = KimiLinearConfig(
        vocab_size=ours.vocab_size,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        moe_intermediate_size=ours.moe_intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_heads,
        n_shared_experts=ours.num_shared_experts,
        num_local_experts=ours.num_experts,
        num_experts_per_tok=ours.experts_per_token,
        kv_lora_rank=ours.kv_lora_rank,
        q_lora_rank=ours.q_lora_rank,
        qk_rope_head_dim=ours.qk_rope_head_dim,
        qk_nope_head_dim=ours.qk_nope_head_dim,
        v_head_dim=ours.v_head_dim,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        linear_attn_config={
            "head_dim": ours.kda_head_dim,
            "num_heads": ours.kda_num_heads,
            "short_conv_kernel_size": ours.kda_conv_size,
            # Its layers count from 1.
            "full_attn_layers": [layer + 1 for layer in ours.mla_layers],
            "kda_layers": [layer + 1 for layer in ours.kda_layers],
        },
    )
    torch.set_default_dtype(torch.float32 if precision == "fp32" else torch.bfloat16)
    model = KimiLinearForCausalLM(config).to(device).train()
    torch.set_default_dtype(torch.float32)
    tokens = _tokens(device).unsqueeze(0)
    facts: dict[str, Any] = {"parameters": sum(parameter.numel() for parameter in model.parameters())}

    def run() -> None:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        facts["loss"] = float(loss.detach())
        model.zero_grad(set_to_none=True)

    return Contestant(run=run, version=f"transformers {version}", facts=facts)


def whole_step(*, precision: str, device: str) -> Contestant:
    """A whole training step of ours: forward, backward, clipping, optimizer, balancing; each part's seconds by name."""
    from openk3 import __version__
    from openk3.model.routing_log import RoutingLog
    from openk3.train.balancing import Balancer
    from openk3.train.optimizer import OptimizerConfig, build_optimizer, clip_grad_norm

    model, forward_backward = _our_parts(precision, device)
    config = OptimizerConfig()
    optimizer = build_optimizer(model, config)
    balancer = Balancer(model)
    parts: dict[str, float] = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        parts[name] = time.perf_counter() - start

    def run() -> dict[str, float]:
        timed("forward+backward", lambda: forward_backward(RoutingLog(observe=balancer.observe)))
        timed("clip", lambda: clip_grad_norm(model.parameters(), 1.0))
        timed("optimizer", optimizer.step)
        timed("balancing", balancer.update)
        optimizer.zero_grad()
        return dict(parts)

    return Contestant(run=run, version=f"openk3 {__version__}", facts={"optimizer": dataclasses.asdict(config)})
