"""`openk3 bench kda`: the KDA op alone, against the plain forms that transformers and flash-linear-attention fall back on.

One sequence, 8 heads of 128 channels, fp32. On a GPU the peer is flash-linear-attention's Triton kernel instead.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from openk3.accounting import kda_chunk_flops
from openk3.bench.contestant import Contestant, PeerMissing, Spec, require
from openk3.bench.race import Lane, matrix_rate
from openk3.bench.row import Row, median
from openk3.bench.session import Peer, Session

HEADS, WIDTH = 8, 128
TOKENS = 2048
FLAT = (1024, 8192)
LOWER_BOUND = -5.0

TRANSFORMERS = "5.24"
FLA = "0.6"

_FALLBACK = "the plain-torch form that runs where its GPU kernels do not; not tuned for CPUs"
# Forward + backward is three times the forward's FLOPs: each product of the forward has two in the backward.
_MODES = {"forward": 1, "forward+backward": 3}
_RUNS = {"forward": 9, "forward+backward": 5}


def measure(session: Session) -> Iterator[Row]:
    """The rows of this benchmark: `forward` and `forward+backward` at 2048 tokens for each peer, then `flat`."""
    for mode, passes in _MODES.items():
        yield from _against_peers(session, mode, passes)
    yield _flat(session)


def _peers(session: Session, mode: str) -> list[Peer]:
    arguments = {"tokens": TOKENS, "mode": mode, "device": session.device}
    if session.device == "cuda":
        note = "its Triton kernel, written for this work; the backend fla of ours is the same kernel"
        return [Peer("fla", Spec(f"{__name__}:fla_triton", arguments), True, note)]
    return [
        Peer("transformers", Spec(f"{__name__}:transformers_fallback", arguments), False, _FALLBACK),
        Peer("fla-naive", Spec(f"{__name__}:fla_naive", arguments), False, _FALLBACK),
    ]


def _against_peers(session: Session, mode: str, passes: int) -> Iterator[Row]:
    mine = Spec(f"{__name__}:ours", {"tokens": TOKENS, "mode": mode, "device": session.device})
    peers = _peers(session, mode)
    specs = {"ours": mine, **{peer.name: peer.spec for peer in peers}, "matmul": _matmul(session)}
    lanes = session.race(f"kda {mode}", specs, runs=_RUNS[mode], warmups=0, profiled="ours")
    lane, rate = lanes["ours"], matrix_rate(lanes["matmul"])
    flops = passes * kda_chunk_flops(HEADS, WIDTH, WIDTH) * TOKENS
    seconds = median(lane.seconds)
    detail = {
        "flops": flops,
        "flops_formula": f"openk3.accounting.kda_chunk_flops x tokens x {passes}",
        "matrix_flops_per_second": rate,
        "memory": lane.memory,
        "facts": _without_results(lane.facts),
        "profile": lane.profile,
        "ours_by_threads_ms": _other_threads(session, mine, mode),
    }
    for peer in peers:
        theirs = lanes[peer.name]
        yield session.row(
            name="kda",
            case=mode,
            unit="ms",
            phase="prefill" if passes == 1 else "training",
            context=TOKENS,
            batch=1,
            precision="fp32",
            scope="op",
            samples=_milliseconds(lane.seconds),
            peer=peer,
            peer_lane=theirs,
            peer_samples=_milliseconds(theirs.seconds),
            lower_is_better=True,
            limit_share=None if seconds is None or rate is None else flops / seconds / rate,
            error=lane.error,
            detail={**detail, "peer_memory": theirs.memory, "largest_difference": _difference(lane, theirs)},
        )


def _flat(session: Session) -> Row:
    """Cost per token at the longer length over that at the shorter; the worse of forward and forward + backward is the figure."""
    short, long = FLAT
    ratios: dict[str, list[float]] = {}
    seconds: dict[str, dict[str, list[float]]] = {}
    errors: list[str] = []
    for mode in _MODES:
        specs = {
            str(tokens): Spec(f"{__name__}:ours", {"tokens": tokens, "mode": mode, "device": session.device}) for tokens in FLAT
        }
        lanes = session.race(f"kda flat {mode}", specs, runs=7, warmups=0)
        errors += [lane.error for lane in lanes.values() if lane.error]
        seconds[mode] = {tokens: lane.seconds for tokens, lane in lanes.items()}
        pairs = zip(lanes[str(long)].seconds, lanes[str(short)].seconds, strict=False)
        ratios[mode] = [after / long / (before / short) for after, before in pairs]
    worst = max(ratios, key=lambda mode: median(ratios[mode]) or 0.0)
    return session.row(
        name="kda",
        case="flat",
        unit=f"cost per token at {long} tokens / at {short}",
        phase="training" if worst == "forward+backward" else "prefill",
        context=long,
        batch=1,
        precision="fp32",
        scope="op",
        samples=[] if errors else ratios[worst],
        lower_is_better=True,
        error="; ".join(errors),
        detail={"worst": worst, "ratios": ratios, "seconds": seconds},
    )


def _other_threads(session: Session, mine: Spec, mode: str) -> dict[str, Any]:
    threads = session.other_threads()
    if threads is None:
        return {}
    lane = session.race(f"kda {mode}, {threads} thread", {"ours": mine}, runs=5, threads=threads, warmups=0)["ours"]
    samples = _milliseconds(lane.seconds)
    return {str(threads): {"median": median(samples), "samples": samples, **({"error": lane.error} if lane.error else {})}}


def _matmul(session: Session) -> Spec:
    return Spec("openk3.bench.machine:matmul", {"dtype": "float32", "device": session.device})


def _milliseconds(seconds: list[float]) -> list[float]:
    return [1e3 * value for value in seconds]


def _without_results(facts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in facts.items() if name != "results"}


def _difference(ours: Lane, theirs: Lane) -> float | None:
    """The largest difference between samples of both sides' output and gradients, each relative to its largest value in the peer: the
    proof that both did the same work."""
    if not (ours.facts and theirs.facts):
        return None
    pairs = zip(ours.facts["results"], theirs.facts["results"], strict=True)
    return max(max(abs(a - b) for a, b in zip(mine, other, strict=True)) / max(map(abs, other)) for mine, other in pairs)


# What the worker processes build. All make the same inputs from seed 0, in the peers' layout [B, T, H, K].


class _Inputs:
    """Queries and keys of length 1, a log decay of the bounded gate, beta within (0, 1), and the gradient that comes back."""

    def __init__(self, tokens: int, mode: str, device: str) -> None:
        if mode not in _MODES:
            raise ValueError(f"mode {mode!r}: one of {', '.join(_MODES)}")
        make = torch.Generator().manual_seed(0)
        shape = (1, tokens, HEADS, WIDTH)
        q, k, self.v, g = (torch.randn(shape, generator=make).to(device) for _ in range(4))
        self.q, self.k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        self.g = LOWER_BOUND * torch.sigmoid(g - 3)
        self.beta = torch.sigmoid(torch.randn(shape[:3], generator=make)).to(device)
        self.grad = torch.randn(shape, generator=make).to(device)
        self.leaves = (self.q, self.k, self.v, self.g, self.beta)
        self.with_backward = mode == "forward+backward"
        for leaf in self.leaves:
            leaf.requires_grad_(self.with_backward)

    def contestant(self, forward: Callable[[], Tensor], version: str, **facts: Any) -> Contestant:
        """`forward` gives the output; timed with its backward when the mode asks for it."""

        def run() -> list[Tensor]:
            if not self.with_backward:
                with torch.no_grad():
                    return [forward()]
            output = forward()
            output.backward(self.grad.view_as(output))
            gradients = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
            for leaf in self.leaves:
                leaf.grad = None
            return [output.detach(), *gradients]

        def timed() -> None:
            run()

        # The warm-up, and what both sides are compared by.
        results = run()
        sampled = [x.flatten()[:: max(1, x.numel() // 64)].tolist() for x in results]
        return Contestant(run=timed, version=version, facts={"results": sampled, **facts})


def ours(*, tokens: int, mode: str, device: str) -> Contestant:
    """The op of this project."""
    from openk3 import __version__
    from openk3.ops import backend
    from openk3.ops.kda import kda
    from openk3.ops.kda_fla import fla_applies
    from openk3.ops.segments import Segments

    inputs = _Inputs(tokens, mode, device)
    segments = Segments.of([tokens])
    form = backend.requested() or ("fla" if fla_applies(inputs.q) else "torch")

    def forward() -> Tensor:
        q, k, v, g, beta = (leaf.flatten(0, 1) for leaf in inputs.leaves)
        output, _ = kda(q, k, v, g, beta, segments, lower_bound=LOWER_BOUND)
        return output

    return inputs.contestant(forward, f"openk3 {__version__}", backend=form)


def transformers_fallback(*, tokens: int, mode: str, device: str) -> Contestant:
    """transformers' chunked form in plain torch."""
    version = require("transformers", TRANSFORMERS)
    from transformers.models.kimi_linear import modeling_kimi_linear

    # The decorated name would look for a GPU kernel first.
    function = modeling_kimi_linear.chunk_kimi_delta_attention
    function = getattr(function, "__wrapped__", function)
    inputs = _Inputs(tokens, mode, device)

    def forward() -> Tensor:
        q, k, v, g, beta = inputs.leaves
        output: Tensor = function(q, k, v, g=g, beta=beta, initial_state=None, output_final_state=True)[0]
        return output

    return inputs.contestant(forward, f"transformers {version}")


def fla_naive(*, tokens: int, mode: str, device: str) -> Contestant:
    """flash-linear-attention's chunked form in plain torch."""
    version = require("fla-core", FLA)
    function = _fla_naive_module().naive_chunk_kda
    inputs = _Inputs(tokens, mode, device)

    def forward() -> Tensor:
        output: Tensor = function(*inputs.leaves, output_final_state=True)[0]
        return output

    return inputs.contestant(forward, f"fla-core {version}")


def _fla_naive_module() -> ModuleType:
    """The one file that holds it: the package itself imports Triton, which a CPU machine does not have."""
    package = importlib.util.find_spec("fla")
    places = package.submodule_search_locations if package is not None else None
    if not places:
        raise PeerMissing("fla-core is installed without its package fla")
    spec = importlib.util.spec_from_file_location("fla_naive_kda", Path(places[0]) / "ops" / "kda" / "naive.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fla_triton(*, tokens: int, mode: str, device: str) -> Contestant:
    """flash-linear-attention's Triton kernel, on a GPU. No GPU has run this yet."""
    version = require("fla-core", FLA)
    from fla.ops.kda import chunk_kda

    inputs = _Inputs(tokens, mode, device)

    def forward() -> Tensor:
        q, k, v, g, beta = inputs.leaves
        output: Tensor = chunk_kda(q, k, v, g, beta, output_final_state=True)[0]
        return output

    return inputs.contestant(forward, f"fla-core {version}")
