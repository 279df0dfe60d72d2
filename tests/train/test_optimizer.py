"""Which optimizer moves which parameter, AdamW, clipping, and a state that resumes exactly."""

from __future__ import annotations

import copy
import io
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from openk3.config import ModelConfig
from openk3.errors import UserError
from openk3.model.decoder import Decoder
from openk3.ops.segments import Segments
from openk3.train.muon import BlockLayout
from openk3.train.optimizer import DECAYED, FROZEN, MUON, PLAIN, Optimizer, OptimizerConfig, build_optimizer, clip_grad_norm


def _k3(**changes: object) -> ModelConfig:
    return ModelConfig.named("debug13").replace(num_layers=4, mla_layers=(3,), **changes)


def _kimi_linear() -> ModelConfig:
    return _k3(
        q_lora_rank=None,
        mla_output_gate=False,
        kda_full_rank_gate=False,
        kda_gate_lower_bound=None,
        activation="silu",
        latent_size=None,
        latent_norm=False,
        attn_res_block_size=None,
    )


def _model(config: ModelConfig) -> Decoder:
    return Decoder(config, generator=torch.Generator().manual_seed(0))


def _fill_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def _patterns(names: tuple[str, ...]) -> set[str]:
    return {re.sub(r"^layers\.\d+\.", "", name) for name in names}


MLP = {"mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"}
SHARED = {"mlp.shared.gate_proj.weight", "mlp.shared.up_proj.weight", "mlp.shared.down_proj.weight"}
ATTENTION = {f"attn.{part}.weight" for part in ("q_proj", "k_proj", "v_proj", "f_down", "f_up", "kv_down", "kv_up", "o_proj")}
EXPERTS = {"mlp.experts.w13", "mlp.experts.w2"}
BY_ADAMW = {"embed.weight", "head.weight", "mlp.router.weight", "attn.beta_proj.weight", "attn.q_conv", "attn.k_conv", "attn.v_conv"}
UNDECAYED = {"norm.weight", "attn_norm.weight", "mlp_norm.weight", "attn.A_log", "attn.dt_bias", "attn.o_norm", "attn.kv_norm.weight"}


def test_every_parameter_of_a_k3_is_in_its_group() -> None:
    model = _model(_k3())
    groups = build_optimizer(model).groups
    latent = {"mlp.latent_down.weight", "mlp.latent_up.weight"}
    low_rank = {"attn.q_down.weight", "attn.q_up.weight", "attn.g_proj.weight"}
    residual = {f"{reader}.{part}" for reader in ("attn_res", "mlp_res", "output_res") for part in ("norm_weight", "query")}
    assert _patterns(groups[MUON]) == MLP | SHARED | ATTENTION | EXPERTS | latent | low_rank
    assert _patterns(groups[DECAYED]) == BY_ADAMW
    assert _patterns(groups[PLAIN]) == UNDECAYED | residual | {"attn.q_norm.weight", "mlp.latent_norm.weight"}
    assert groups[FROZEN] == ()
    names = [name for members in groups.values() for name in members]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_every_parameter_of_a_kimi_linear_is_in_its_group() -> None:
    groups = build_optimizer(_model(_kimi_linear())).groups
    assert _patterns(groups[MUON]) == MLP | SHARED | ATTENTION | EXPERTS | {"attn.g_down.weight", "attn.g_up.weight"}
    assert _patterns(groups[DECAYED]) == BY_ADAMW
    assert _patterns(groups[PLAIN]) == UNDECAYED


def test_layers_without_experts_or_without_kda_are_covered() -> None:
    for config in (_k3(num_experts=None), _k3().replace(mla_layers=(0, 1, 2, 3)), _k3().replace(mla_layers=()), _k3(num_shared_experts=0)):
        model = _model(config)
        groups = build_optimizer(model).groups
        assert sum(len(members) for members in groups.values()) == len(list(model.parameters()))


def test_tied_head_is_one_parameter_of_adamw() -> None:
    groups = build_optimizer(_model(_k3(tie_word_embeddings=True))).groups
    assert "embed.weight" in groups[DECAYED]
    assert not any(name.startswith("head") for members in groups.values() for name in members)


def test_adamw_alone_takes_the_matrices_with_decay() -> None:
    model = _model(_k3())
    muon, adamw = (build_optimizer(model, OptimizerConfig(kind=kind)).groups for kind in ("muon", "adamw"))  # type: ignore[arg-type]
    assert adamw[MUON] == ()
    assert set(adamw[DECAYED]) == set(muon[MUON]) | set(muon[DECAYED])
    assert adamw[PLAIN] == muon[PLAIN]


def _layouts(model: Decoder, **settings: object) -> dict[str, BlockLayout]:
    optimizer = build_optimizer(model, OptimizerConfig(**settings))  # type: ignore[arg-type]
    return {name: layout for name, (_, layout) in optimizer._muon.matrices.items()}


def test_blocks_of_heads_and_experts() -> None:
    # Heads: KDA 4 of 16; MLA 4 with 16 own and 8 shared key dimensions and values of 16. Experts: 8 of width 32 on a latent of 32.
    layouts = _layouts(_model(_k3()))
    for part in ("q_proj", "k_proj", "v_proj"):
        assert layouts[f"layers.0.attn.{part}.weight"] == (4, (16,))
    assert layouts["layers.0.attn.o_proj.weight"] == (1, (64,))
    assert layouts["layers.0.attn.f_up.weight"] == (1, (64,))
    assert layouts["layers.3.attn.q_up.weight"] == (4, (24,))
    assert layouts["layers.3.attn.kv_up.weight"] == (4, (16, 16))
    assert layouts["layers.3.attn.kv_down.weight"] == (1, (24,))
    assert layouts["layers.1.mlp.experts.w13"] == (8, (32, 32))
    assert layouts["layers.1.mlp.experts.w2"] == (8, (32,))
    assert _layouts(_model(_kimi_linear()))["layers.3.attn.q_proj.weight"] == (4, (24,))


def test_whole_matrices_keep_experts_apart() -> None:
    layouts = _layouts(_model(_k3()), per_head=False)
    assert layouts["layers.0.attn.q_proj.weight"] == (1, (64,))
    assert layouts["layers.3.attn.q_up.weight"] == (1, (96,))
    assert layouts["layers.3.attn.kv_up.weight"] == (1, (128,))
    assert layouts["layers.1.mlp.experts.w13"] == (8, (32, 32))


def test_a_parameter_that_no_rule_knows_is_refused() -> None:
    model = _model(_k3())
    model.layers[0].register_parameter("extra", nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match=r"layers\.0\.extra is claimed by 0 rules"):
        build_optimizer(model)


def test_weights_narrower_than_fp32_are_refused() -> None:
    with pytest.raises(ValueError, match=r"embed\.weight is torch\.bfloat16"):
        build_optimizer(_model(_k3()).to(torch.bfloat16))


def test_frozen_parameters_are_named_and_not_moved() -> None:
    model = _model(_k3())
    model.embed.weight.requires_grad_(False)
    model.layers[0].mlp.gate_proj.weight.requires_grad_(False)
    optimizer = build_optimizer(model)
    assert set(optimizer.groups[FROZEN]) == {"embed.weight", "layers.0.mlp.gate_proj.weight"}
    assert len(optimizer.parameters) == len(list(model.parameters())) - 2


def test_adamw_by_the_formula() -> None:
    model = _model(_k3()).double()
    settings = OptimizerConfig(lr=0.01, weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-6)
    optimizer = build_optimizer(model, settings)
    decays = {
        "embed.weight": 0.1,
        "layers.0.attn.q_conv": 0.1,
        "layers.1.mlp.router.weight": 0.1,
        "layers.0.attn.A_log": 0.0,
        "norm.weight": 0.0,
    }
    parameters = dict(model.named_parameters())
    expected = {name: parameters[name].detach().clone() for name in decays}
    mean = {name: torch.zeros_like(value) for name, value in expected.items()}
    square = {name: torch.zeros_like(value) for name, value in expected.items()}
    for step in (1, 2, 3):
        _fill_gradients(model, step)
        for name, decay in decays.items():
            gradient = parameters[name].grad
            assert gradient is not None
            mean[name] = 0.8 * mean[name] + 0.2 * gradient
            square[name] = 0.9 * square[name] + 0.1 * gradient.square()
            towards = (mean[name] / (1 - 0.8**step)) / ((square[name] / (1 - 0.9**step)).sqrt() + 1e-6)
            expected[name] = expected[name] - 0.005 * decay * expected[name] - 0.005 * towards
        optimizer.step(lr_scale=0.5)
    for name, value in expected.items():
        assert (parameters[name] - value).abs().max() < 1e-12, name


def test_decay_reaches_matrices_and_nothing_else() -> None:
    model = _model(_k3())
    optimizer = build_optimizer(model, OptimizerConfig(lr=0.5, weight_decay=0.1))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1.0 if name in optimizer.groups[PLAIN] else 0.95
        assert torch.allclose(parameter, before[name] * factor, rtol=1e-6, atol=0.0), name


def test_unused_parameters_stay_as_they_are() -> None:
    model = _model(_k3())
    optimizer = build_optimizer(model)
    tokens = torch.arange(40)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.loss(tokens, Segments.of([40]), tokens).total.backward()
    unused = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert unused == {"layers.0.attn_res.norm_weight", "layers.0.attn_res.query"}
    optimizer.step()
    unmoved = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
    # A query at zero gives its norm weight no gradient yet.
    assert unused <= unmoved and all(name in unused or name.endswith("norm_weight") for name in unmoved)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_few_steps_on_one_batch_learn_it(kind: str) -> None:
    model = _model(_k3())
    optimizer = build_optimizer(model, OptimizerConfig(kind=kind, lr=0.02))  # type: ignore[arg-type]
    tokens = torch.randint(0, 200, (33,), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(25):
        terms = model.loss(tokens[:-1], Segments.of([32]), tokens[1:])
        (terms.total / 32).backward()
        losses.append(float(terms.total.detach()) / 32)
        assert math.isfinite(clip_grad_norm(optimizer.parameters, 1.0))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] > 5.0 and losses[-1] < 1.0


@pytest.mark.parametrize("settings", [{}, {"kind": "adamw"}, {"per_head": False}])
def test_state_resumes_bit_for_bit(settings: dict[str, object], tmp_path: Path) -> None:
    straight = _model(_k3())
    config = OptimizerConfig(lr=0.01, **settings)  # type: ignore[arg-type]
    optimizer = build_optimizer(straight, config)
    for step in range(4):
        _fill_gradients(straight, step)
        optimizer.step()
        if step == 1:
            weights = copy.deepcopy(straight.state_dict())
            torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    resumed = _model(_k3())
    resumed.load_state_dict(weights)
    again = build_optimizer(resumed, config)
    again.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for step in (2, 3):
        _fill_gradients(resumed, step)
        again.step()
    for (name, one), two in zip(straight.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two), name
    for kind, tensors in optimizer.state_dict().items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, again.state_dict()[kind][name]), (kind, name)


def _saved(optimizer: Optimizer) -> dict[str, dict[str, Tensor]]:
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    model = _model(_k3())
    optimizer = build_optimizer(model)
    _fill_gradients(model, 0)
    optimizer.step()
    before = _saved(optimizer)
    lacking, unknown, reshaped, narrowed = (copy.deepcopy(before) for _ in range(4))
    del lacking["momentum"]["layers.0.attn.o_proj.weight"]
    unknown["mean"]["layers.9.mlp_norm.weight"] = torch.zeros(64)
    reshaped["square"]["embed.weight"] = torch.zeros(2, 64)
    narrowed["momentum"]["layers.0.attn.o_proj.weight"] = torch.zeros(64, 64, dtype=torch.bfloat16)
    for state, message in (
        (lacking, "lacks momentum of layers.0.attn.o_proj.weight"),
        (unknown, "holds an unknown mean of layers.9.mlp_norm.weight"),
        (reshaped, "square of embed.weight is"),
        (narrowed, "momentum of layers.0.attn.o_proj.weight is torch.bfloat16"),
        (_saved(build_optimizer(model, OptimizerConfig(kind="adamw"))), "lacks momentum"),
    ):
        with pytest.raises(UserError, match=message):
            optimizer.load_state_dict(state)
        after = optimizer.state_dict()
        assert all(torch.equal(tensor, after[kind][name]) for kind, tensors in before.items() for name, tensor in tensors.items())


def _with_gradients(*gradients: list[float]) -> list[nn.Parameter]:
    parameters = []
    for values in gradients:
        parameter = nn.Parameter(torch.zeros(len(values)))
        parameter.grad = torch.tensor(values)
        parameters.append(parameter)
    return parameters


def test_clipping_uses_the_joint_norm() -> None:
    parameters = _with_gradients([2.0, 4.0], [6.0, 8.0])
    assert clip_grad_norm(parameters, 5.0) == pytest.approx(math.sqrt(120.0))
    shrunk = [value for parameter in parameters for value in parameter.grad.tolist()]  # type: ignore[union-attr]
    assert shrunk == pytest.approx([value * 5.0 / math.sqrt(120.0) for value in (2.0, 4.0, 6.0, 8.0)])
    assert clip_grad_norm(parameters, 5.0) == pytest.approx(5.0)


def test_small_gradients_and_measuring_leave_gradients_alone() -> None:
    parameters = [*_with_gradients([3.0, 4.0]), nn.Parameter(torch.zeros(2))]
    for limit in (5.0, 6.0, math.inf):
        assert clip_grad_norm(parameters, limit) == 5.0
        assert parameters[0].grad is not None and parameters[0].grad.tolist() == [3.0, 4.0]
    assert clip_grad_norm(parameters[1:], 1.0) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_norm_that_is_not_finite_is_told_and_nothing_scaled(value: float) -> None:
    parameters = _with_gradients([3.0, 4.0], [value])
    assert not math.isfinite(clip_grad_norm(parameters, 1.0))
    assert parameters[0].grad is not None and parameters[0].grad.tolist() == [3.0, 4.0]


def test_norm_of_many_values_is_accurate() -> None:
    values = torch.full((1 << 22,), 0.1)
    parameter = nn.Parameter(torch.zeros_like(values))
    parameter.grad = values
    assert clip_grad_norm([parameter], math.inf) == pytest.approx(math.sqrt((1 << 22) * float(values[0]) ** 2), rel=1e-4)


def test_clipping_to_nothing_is_refused() -> None:
    for limit in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm"):
            clip_grad_norm([], limit)


@pytest.mark.parametrize(
    "setting",
    [
        {"kind": "sgd"},
        {"lr": 0.0},
        {"lr": math.inf},
        {"weight_decay": -0.1},
        {"momentum": 1.0},
        {"newton_schulz_steps": 0},
        {"newton_schulz_precision": "float16"},
        {"update_rms": 0.0},
        {"rms_shape": "head"},
        {"beta1": 1.0},
        {"beta2": -0.1},
        {"eps": 0.0},
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, object]) -> None:
    with pytest.raises(UserError, match=rf"optimizer\.{next(iter(setting))}"):
        OptimizerConfig(**setting)  # type: ignore[arg-type]
