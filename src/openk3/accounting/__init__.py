"""What a model costs, from its config alone: parameters, bytes, FLOPs. The one place where these formulas live.

Nothing here imports torch; tests hold the figures against real models, and the release's own against its published counts.
"""

from __future__ import annotations

from openk3.accounting.flops import (
    decode_flops,
    kda_chunk_flops,
    kda_step_flops,
    mixing_sources,
    mla_absorbed_flops,
    mla_expanded_flops,
    muon_blocks,
    muon_flops,
    newton_schulz_flops,
    prefill_flops,
    projection_flops,
    training_flops,
)
from openk3.accounting.memory import (
    PRECISIONS,
    bits_per_weight,
    conv_tail_bytes,
    expert_bytes,
    kda_state_bytes,
    latent_bytes_per_token,
    latent_width,
    state_bytes,
    tensor_bytes,
    weight_bytes,
)
from openk3.accounting.parameters import (
    SYSTEMS,
    Parameter,
    active_counts,
    active_parameters,
    parameter_counts,
    parameters,
    stored_parameters,
    total_parameters,
)
from openk3.accounting.training import (
    activation_bytes,
    optimizer_bytes,
    saved_by_layer,
    training_bytes,
)

__all__ = [
    "PRECISIONS",
    "SYSTEMS",
    "Parameter",
    "activation_bytes",
    "active_counts",
    "active_parameters",
    "bits_per_weight",
    "conv_tail_bytes",
    "decode_flops",
    "expert_bytes",
    "kda_chunk_flops",
    "kda_state_bytes",
    "kda_step_flops",
    "latent_bytes_per_token",
    "latent_width",
    "mixing_sources",
    "mla_absorbed_flops",
    "mla_expanded_flops",
    "muon_blocks",
    "muon_flops",
    "newton_schulz_flops",
    "optimizer_bytes",
    "parameter_counts",
    "parameters",
    "prefill_flops",
    "projection_flops",
    "saved_by_layer",
    "state_bytes",
    "stored_parameters",
    "tensor_bytes",
    "total_parameters",
    "training_bytes",
    "training_flops",
    "weight_bytes",
]
