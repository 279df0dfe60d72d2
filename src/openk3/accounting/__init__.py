"""What a model costs, from its config alone: parameters, bytes, FLOPs. The one place where these formulas live.

Nothing here imports torch; tests hold every figure against real models, and the release's own against its published counts.
"""

from __future__ import annotations

from openk3.accounting.flops import (
    decode_flops as decode_flops,
)
from openk3.accounting.flops import (
    kda_chunk_flops as kda_chunk_flops,
)
from openk3.accounting.flops import (
    kda_step_flops as kda_step_flops,
)
from openk3.accounting.flops import (
    mixing_sources as mixing_sources,
)
from openk3.accounting.flops import (
    muon_blocks as muon_blocks,
)
from openk3.accounting.flops import (
    muon_flops as muon_flops,
)
from openk3.accounting.flops import (
    newton_schulz_flops as newton_schulz_flops,
)
from openk3.accounting.flops import (
    prefill_flops as prefill_flops,
)
from openk3.accounting.flops import (
    projection_flops as projection_flops,
)
from openk3.accounting.flops import (
    training_flops as training_flops,
)
from openk3.accounting.memory import (
    PRECISIONS as PRECISIONS,
)
from openk3.accounting.memory import (
    bits_per_weight as bits_per_weight,
)
from openk3.accounting.memory import (
    conv_tail_bytes as conv_tail_bytes,
)
from openk3.accounting.memory import (
    expert_bytes as expert_bytes,
)
from openk3.accounting.memory import (
    kda_state_bytes as kda_state_bytes,
)
from openk3.accounting.memory import (
    latent_bytes_per_token as latent_bytes_per_token,
)
from openk3.accounting.memory import (
    state_bytes as state_bytes,
)
from openk3.accounting.memory import (
    tensor_bytes as tensor_bytes,
)
from openk3.accounting.memory import (
    weight_bytes as weight_bytes,
)
from openk3.accounting.parameters import (
    SYSTEMS as SYSTEMS,
)
from openk3.accounting.parameters import (
    Parameter as Parameter,
)
from openk3.accounting.parameters import (
    active_counts as active_counts,
)
from openk3.accounting.parameters import (
    active_parameters as active_parameters,
)
from openk3.accounting.parameters import (
    parameter_counts as parameter_counts,
)
from openk3.accounting.parameters import (
    parameters as parameters,
)
from openk3.accounting.parameters import (
    stored_parameters as stored_parameters,
)
from openk3.accounting.parameters import (
    total_parameters as total_parameters,
)
from openk3.accounting.training import (
    activation_bytes as activation_bytes,
)
from openk3.accounting.training import (
    optimizer_bytes as optimizer_bytes,
)
from openk3.accounting.training import (
    saved_by_layer as saved_by_layer,
)
from openk3.accounting.training import (
    training_bytes as training_bytes,
)
