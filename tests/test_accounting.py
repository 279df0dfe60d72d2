"""Accounting: against the release's published counts, against real models and states, against counting by hand."""

from __future__ import annotations

import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from openk3 import accounting
from openk3.checkpoint.inventory import K3_VISION_CONFIG, tensor_inventory, vision_inventory
from openk3.checkpoint.shards import Shards
from openk3.config import ModelConfig
from openk3.errors import UserError
from openk3.model.decoder import Decoder
from openk3.model.mla import MLA
from openk3.model.state import DecoderState
from openk3.ops.segments import Segments

ORACLES = Path(__file__).parent / "oracles"

SWITCHES: list[dict[str, Any]] = [
    {},
    {"attn_res_block_size": None},
    {"mla_layers": ()},
    {"mla_layers": tuple(range(13))},
    {"num_experts": None},
    {"latent_size": None},
    {"latent_norm": False},
    {"num_shared_experts": 0},
    {"q_lora_rank": None, "mla_output_gate": False, "kda_full_rank_gate": False},
    {"moe_layer_freq": 2, "first_dense_layers": 3},
    {"tie_word_embeddings": True},
]


def debug(**changes: Any) -> ModelConfig:
    return ModelConfig.named("debug13").replace(**changes)


def built(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Decoder:
    """The real model, without memory for its weights."""
    with torch.device("meta"):
        return Decoder(config).to(dtype)


# ---- the release -----------------------------------------------------------------------------------------------------------------------


def test_the_release_counts_close_exactly() -> None:
    config = ModelConfig.named("k3")
    counts = accounting.parameter_counts(config)
    assert counts["kda"] == 69 * 443_740_384
    assert counts["mla"] == 24 * 232_196_096
    assert counts["dense_mlp"] == 726_663_168
    assert counts["routed_experts"] == 92 * 896 * 33_030_144
    assert counts["router"] + counts["latent"] + counts["shared_experts"] == 92 * 189_927_808
    assert counts["norms"] + counts["attn_res"] == 93 * 6 * 7168 + 3 * 7168
    assert counts["embedding"] == counts["head"] == 1_174_405_120
    assert accounting.total_parameters(config) == 2_779_484_476_000
    assert accounting.stored_parameters(config) == 2_779_484_478_208
    assert accounting.active_parameters(config) == 104_189_612_640
    assert accounting.active_parameters(config, embedding=True) == 104_189_612_640 + 1_174_405_120
    assert accounting.active_parameters(config, head=False) == 104_189_612_640 - 1_174_405_120


def test_the_release_inventory() -> None:
    config = ModelConfig.named("k3")
    packed = [*tensor_inventory(config, experts="mxfp4"), *vision_inventory(K3_VISION_CONFIG)]
    assert len(packed) == len({tensor.name for tensor in packed}) == 497_220
    assert sum(prod(tensor.shape) for tensor in packed) == 1_503_647_073_024
    assert sum(tensor.name.endswith("_packed") for tensor in packed) == 247_296
    vision = list(vision_inventory(K3_VISION_CONFIG))
    assert len(vision) == 168 and sum(prod(tensor.shape) for tensor in vision) == 447_358_976
    assert accounting.stored_parameters(config) + 447_358_976 == 2_779_931_837_184
    size = {"BF16": 2, "F32": 4, "U8": 1}
    files = sum(prod(tensor.shape) * size[tensor.dtype] for tensor in packed)
    # The published size of the files, 1,560,936,091,448 bytes, has their headers too: some 150 bytes a tensor.
    assert 100 * 497_220 < 1_560_936_091_448 - files < 200 * 497_220


def test_kimi_linear_counts() -> None:
    config = ModelConfig.named("kimi_linear_48b")
    assert accounting.total_parameters(config) == 49_122_681_728
    assert round(accounting.active_parameters(config) / 1e9, 3) == 3.107
    assert len(list(tensor_inventory(config))) == 20_493
    assert accounting.kda_state_bytes(config) == 41_943_040
    assert accounting.latent_bytes_per_token(config) == 8_064


def test_what_a_sequence_of_the_release_remembers() -> None:
    config = ModelConfig.named("k3")
    assert accounting.kda_state_bytes(config) == 434_110_464
    assert accounting.conv_tail_bytes(config) == 69 * 3 * 12288 * 3 * 2
    assert accounting.latent_bytes_per_token(config) == 27_648
    assert accounting.latent_bytes_per_token(config, "fp8") == 13_824
    # State and latents take equal room at 15.7 K tokens.
    assert accounting.kda_state_bytes(config) // accounting.latent_bytes_per_token(config) == 15_701
    twin = config.replace(mla_layers=tuple(range(93)))
    context = 2**20
    assert round(accounting.latent_bytes_per_token(twin) * context / 2**30, 1) == 104.6
    saving = {n: 1 - accounting.state_bytes(config, [n * 1024]) / accounting.state_bytes(twin, [n * 1024]) for n in (8, 32, 128, 1024)}
    assert {n: round(share, 2) for n, share in saving.items()} == {8: 0.23, 32: 0.61, 128: 0.71, 1024: 0.74}


# ---- against real models ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", SWITCHES, ids=str)
def test_every_parameter_of_a_model(changes: dict[str, Any]) -> None:
    config = debug(**changes)
    model = built(config)
    real = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    real |= {name: tuple(buffer.shape) for name, buffer in model.named_buffers()}
    mine = list(accounting.parameters(config))
    assert {parameter.name: parameter.shape for parameter in mine} == real
    assert len(mine) == len(real)
    assert accounting.total_parameters(config) == sum(accounting.parameter_counts(config).values()) == sum(map(prod, real.values()))
    assert {parameter.name for parameter in mine if parameter.kind == "buffer"} == {name for name, _ in model.named_buffers()}
    assert set(accounting.parameter_counts(config)) == set(accounting.SYSTEMS)


@pytest.mark.parametrize("name", ["nano", "mini", "mid", "kimi_linear_48b"])
def test_named_models(name: str) -> None:
    config = ModelConfig.named(name)
    assert accounting.total_parameters(config) == sum(t.numel() for t in [*built(config).parameters(), *built(config).buffers()])


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float64, "fp64")])
@pytest.mark.parametrize("changes", [{}, {"mla_layers": (), "num_experts": None}], ids=str)
def test_bytes_of_a_models_weights(dtype: torch.dtype, precision: str, changes: dict[str, Any]) -> None:
    config = debug(**changes)
    model = built(config, dtype)
    assert sum(accounting.weight_bytes(config, precision).values()) == sum(t.nbytes for t in [*model.parameters(), *model.buffers()])
    routed = accounting.weight_bytes(config, precision)["routed_experts"]
    assert routed == sum(t.nbytes for name, t in model.named_parameters() if ".experts." in name)


@pytest.mark.parametrize(("dtype", "precision"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float64, "fp64")])
@pytest.mark.parametrize("changes", [{}, {"mla_layers": ()}, {"mla_layers": tuple(range(13))}, {"kda_conv_size": 1}], ids=str)
def test_bytes_of_a_real_state(dtype: torch.dtype, precision: str, changes: dict[str, Any]) -> None:
    config = debug(**changes)
    state = DecoderState.empty(config, sequences=3, dtype=dtype)
    assert state.nbytes == accounting.state_bytes(config, [0, 0, 0], precision)
    model = Decoder(config).to(dtype).eval()
    with torch.no_grad():
        model(torch.arange(12) % 256, Segments.of([5, 0, 7]), state)
        model(torch.arange(4) % 256, Segments.of([1, 2, 1]), state)
    assert state.lengths == [6, 2, 8]
    assert state.nbytes == accounting.state_bytes(config, state.lengths, precision)


def files_of(name: str) -> dict[str, tuple[tuple[int, ...], str]]:
    tensors = Shards.at(ORACLES / name / "model").tensors
    return {tensor: (tuple(header.shape), header.dtype) for tensor, header in tensors.items()}


@pytest.mark.parametrize(
    ("name", "experts", "trunk"),
    [("k3_tiny", "plain", "F32"), ("kimi_linear_tiny_release", "plain", "F32"), ("k3_tiny_mxfp4", "mxfp4", "BF16")],
)
def test_inventory_of_real_files(name: str, experts: Any, trunk: str) -> None:
    config = ModelConfig.from_json(ORACLES / name / "model")
    inventory = list(tensor_inventory(config, experts=experts, trunk=trunk))
    if "vision_config" in config.passthrough.get("top", {}):
        inventory += vision_inventory(config.passthrough["top"]["vision_config"], dtype=trunk)
    assert {tensor.name: (tensor.shape, tensor.dtype) for tensor in inventory} == files_of(name)
    stored = sum(prod(tensor.shape) for tensor in tensor_inventory(config))
    assert stored == accounting.stored_parameters(config)


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(UserError, match=r"experts\.0\.w2\.weight has 48 columns: MXFP4 packs blocks of 32"):
        list(tensor_inventory(debug(moe_intermediate_size=48), experts="mxfp4"))


# ---- bytes -----------------------------------------------------------------------------------------------------------------------------


def test_bytes_of_a_tensor() -> None:
    assert accounting.tensor_bytes((3, 64), "bf16") == accounting.tensor_bytes((3, 64), "torch.bfloat16") == 384
    assert accounting.tensor_bytes((3, 64), "mxfp4") == 3 * (32 + 2)
    assert accounting.tensor_bytes((3, 64), "mxfp8") == 3 * (64 + 2)
    # Whole blocks: 33 columns are padded to 64.
    assert accounting.tensor_bytes((3, 33), "mxfp4") == 3 * (32 + 2)
    assert accounting.tensor_bytes((0, 64), "mxfp4") == 0
    assert accounting.bits_per_weight("mxfp4") == 4.25 and accounting.bits_per_weight("mxfp8") == 8.25
    with pytest.raises(UserError, match=r"'int3' is no precision"):
        accounting.tensor_bytes((1,), "int3")


def test_the_release_packed() -> None:
    config = ModelConfig.named("k3")
    assert accounting.expert_bytes(config) == 17_547_264
    packed = accounting.weight_bytes(config, "bf16", "mxfp4")
    assert packed["routed_experts"] == 82_432 * 17_547_264
    half = sum(accounting.weight_bytes(config, "fp16").values())
    # Raw 4 bits, with scales, and as released with the trunk in bf16: 25 %, 26.6 % and 28.1 % of fp16.
    assert [round(bits / 16, 3) for bits in (4, accounting.bits_per_weight("mxfp4"))] == [0.25, 0.266]
    assert round(sum(packed.values()) / half, 3) == 0.281
    # What one token reads at batch 1: 16 experts in each of 92 layers.
    assert round(92 * 16 * accounting.expert_bytes(config) / 1e9, 2) == 25.83


# ---- FLOPs -----------------------------------------------------------------------------------------------------------------------------


def test_kda_flops() -> None:
    assert accounting.kda_chunk_flops(1, 128, 128) == 180_224
    assert accounting.kda_chunk_flops(8, 128, 128) == 8 * 180_224
    assert accounting.kda_step_flops(2, 4, 8) == 2 * 7 * 32


@pytest.mark.parametrize(("layers", "size"), [(13, 6), (13, 1), (13, 4), (93, 12), (5, 100), (1, 1)])
def test_mixing_sources_by_walking_the_layers(layers: int, size: int) -> None:
    blocks = read = 0
    for layer in range(layers):
        if blocks:
            read += blocks + 1
        if layer % size == 0:
            blocks += 1
        read += blocks + 1
    read += blocks + 1
    changes = {"num_layers": layers, "attn_res_block_size": size, "mla_layers": (layers - 1,)}
    assert accounting.mixing_sources(debug(**changes)) == read
    assert accounting.mixing_sources(debug(**changes).replace(attn_res_block_size=None)) == 0


@pytest.mark.parametrize("changes", [{}, {"mla_output_gate": False, "q_lora_rank": None}], ids=str)
@pytest.mark.parametrize(("new", "past", "absorb"), [(1, 0, False), (1, 40, False), (1, 40, True), (1, 0, True)])
def test_flops_of_a_real_mla_layer(changes: dict[str, Any], new: int, past: int, absorb: bool) -> None:
    """torch counts the multiplications that a layer really makes; with one new token nothing above the diagonal is among them."""
    config = debug(num_experts=None, attn_res_block_size=None, mla_layers=tuple(range(13))).replace(**changes)
    model = Decoder(config).eval()
    mla = model.layers[3].attn
    assert isinstance(mla, MLA)
    mla.absorb = absorb
    state = DecoderState.empty(config)
    memory = state.layers[3]
    with torch.no_grad():
        if past:
            mla(torch.randn(past, config.hidden_size), Segments.of([past]), memory)
        with FlopCounterMode(display=False) as counter:
            mla(torch.randn(new, config.hidden_size), Segments.of([new]), memory)
    form = accounting.mla_absorbed_flops if absorb else accounting.mla_expanded_flops
    projections = accounting.projection_flops(config)["mla"] // 13
    assert counter.get_total_flops() == new * projections + form(config, new, past)


def test_flops_of_real_mlps() -> None:
    config = debug(attn_res_block_size=None)
    model = Decoder(config).eval()
    x_TD = torch.randn(40, config.hidden_size)
    per_token = accounting.projection_flops(config)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.layers[0].mlp(x_TD)
    assert counter.get_total_flops() == 40 * per_token["dense_mlp"]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.layers[1].mlp.shared(x_TD)
        model.layers[1].mlp.router(x_TD)
        model.layers[1].mlp.latent_up(model.layers[1].mlp.latent_down(x_TD))
    assert counter.get_total_flops() == 40 * (per_token["shared_experts"] + per_token["router"] + per_token["latent"]) // 12
    # Two of eight experts for each token, three matrices of 32 × 32 each.
    assert per_token["routed_experts"] == 12 * 2 * 3 * 2 * 32 * 32


def test_decoding_takes_two_flops_a_weight() -> None:
    config = ModelConfig.named("k3")
    flops = accounting.decode_flops(config, 1)
    # Beyond the active weights only KDA's recurrence, the mixing over depth and one pair of the attention.
    extra = 69 * (7 * 96 * 128 * 128) + accounting.mixing_sources(config) * 6 * 7168 + 24 * 2 * 96 * (576 + 512)
    matrices = accounting.active_parameters(config) - sum(p.count for p in accounting.parameters(config) if p.kind in ("vector", "buffer"))
    assert sum(flops.values()) == 2 * matrices + 69 * 3 * 2 * 12288 * 4 + extra
    deeper = accounting.decode_flops(config, 100_001)
    assert deeper["mla"] - flops["mla"] == 100_000 * 24 * 2 * 96 * (576 + 512)
    assert {system for system in flops if deeper[system] != flops[system]} == {"mla"}


def test_prefill_flops() -> None:
    config = debug()
    whole = accounting.prefill_flops(config, 100)
    parts = [accounting.prefill_flops(config, 60), accounting.prefill_flops(config, 40, past=60)]
    for system in set(accounting.SYSTEMS) - {"mla", "head"}:
        assert whole[system] == sum(part[system] for part in parts)
    # The second part expands the first part's latents once more, or works on latents: never cheaper than all at once.
    assert whole["mla"] <= sum(part["mla"] for part in parts)
    assert whole["head"] == 2 * 64 * 256 and accounting.prefill_flops(config, 100, logits=100)["head"] == 100 * whole["head"]
    by_hand = 4 * 2 * (100 * 16 * 4 * 32 + 5050 * 4 * (24 + 16))
    assert whole["mla"] == 100 * accounting.projection_flops(config)["mla"] + by_hand


def test_training_flops() -> None:
    config = debug()
    forward = sum(accounting.prefill_flops(config, 256, logits=256).values())
    head = accounting.prefill_flops(config, 256, logits=256)["head"]
    assert accounting.training_flops(config, 256) == 3 * forward
    assert accounting.training_flops(config, 256, recompute="layer") == 4 * forward - head
    quarters = 4 * sum(accounting.prefill_flops(config, 64, logits=64).values())
    assert accounting.training_flops(config, 256, sequence_length=64) == 3 * quarters
    assert accounting.training_flops(config, 250, sequence_length=100) == 2 * accounting.training_flops(
        config, 100
    ) + accounting.training_flops(config, 50)
    assert accounting.training_flops(config, 0) == 0


def test_muon_flops() -> None:
    # 5 steps on a 4 × 6 matrix: two products of 4·4·6 and one of 4·4·4 each.
    assert accounting.newton_schulz_flops(4, 6) == accounting.newton_schulz_flops(6, 4) == 5 * 2 * (2 * 96 + 64)
    # On a long one the Gram matrix pays: two long products, seventeen small ones.
    assert accounting.newton_schulz_flops(4, 400) == 2 * (2 * 4 * 4 * 400 + 17 * 64)
    config = debug()
    blocks = {p.name: accounting.muon_blocks(config, p) for p in accounting.parameters(config)}
    assert blocks["layers.0.attn.q_proj.weight"] == [(4, 16, 64)]
    assert blocks["layers.3.attn.q_up.weight"] == [(4, 24, 24)]
    assert blocks["layers.3.attn.kv_up.weight"] == [(4, 16, 16), (4, 16, 16)]
    assert blocks["layers.1.mlp.experts.w13"] == [(16, 32, 32)]
    assert blocks["layers.1.mlp.experts.w2"] == [(8, 32, 32)]
    assert blocks["layers.1.mlp.latent_down.weight"] == [(1, 32, 64)]
    assert blocks["embed.weight"] == blocks["layers.1.mlp.router.weight"] == blocks["layers.0.attn.A_log"] == []
    covered = sum(count * rows * columns for found in blocks.values() for count, rows, columns in found)
    assert covered == sum(p.count for p in accounting.parameters(config) if p.muon)


# ---- the house -------------------------------------------------------------------------------------------------------------------------


def test_no_torch() -> None:
    code = "import sys, openk3.accounting, openk3.checkpoint.inventory; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"
