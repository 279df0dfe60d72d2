"""openk3: Kimi K3, assembled. Train, lower, serve, spread and account for K3-style models of any size.

Load a checkpoint and run it:

    import openk3, torch
    model = openk3.load("runs/demo")
    out = model(torch.tensor([1, 2, 3]), openk3.Segments.of([3]))
    out.logits  # [3, vocabulary]
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openk3.checkpoint.load import load as load
    from openk3.config import ModelConfig as ModelConfig
    from openk3.model.decoder import Decoder as Decoder
    from openk3.model.decoder import DecoderOutput as DecoderOutput
    from openk3.model.routing_log import RoutingLog as RoutingLog
    from openk3.model.state import DecoderState as DecoderState
    from openk3.model.trace import Trace as Trace
    from openk3.ops.segments import Segments as Segments

__version__ = "0.1.0"

# Names are fetched on first use: `openk3 --help` must not wait for torch.
_HOMES = {
    "load": "openk3.checkpoint.load",
    "ModelConfig": "openk3.config",
    "Decoder": "openk3.model.decoder",
    "DecoderOutput": "openk3.model.decoder",
    "RoutingLog": "openk3.model.routing_log",
    "DecoderState": "openk3.model.state",
    "Trace": "openk3.model.trace",
    "Segments": "openk3.ops.segments",
}
__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'openk3' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
