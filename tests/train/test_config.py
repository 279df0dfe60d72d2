"""Settings: what is read, what is refused and in which words, and that what is dumped is read back equal."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openk3.errors import UserError
from openk3.train import toml_tree
from openk3.train.config import (
    CheckpointSettings,
    ComputeSettings,
    DataSettings,
    ModelSettings,
    ScheduleSettings,
    TrainConfig,
    with_overrides,
)
from openk3.train.optimizer import OptimizerConfig


def refusal(tmp_path: Path, text: str) -> str:
    file = tmp_path / "train.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        TrainConfig.from_toml(file)
    message = str(error.value)
    assert message.startswith(f"{file}: ") and "\n" not in message
    return message.removeprefix(f"{file}: ")


def test_a_file_sets_what_it_names_and_leaves_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_text(
        'seed = 7\n[model]\nname = "debug13"\n[model.overrides]\nhidden_size = 32\nattn_res_block_size = "none"\nmla_layers = [1, 2]\n'
        '[data]\npaths = ["a", "b c"]\n[optimizer]\nlr = 1\n[schedule]\nminutes = 4.5\n[compute]\nrecompute = "block"\n',
        encoding="utf-8",
    )
    config = TrainConfig.from_toml(file)
    assert config.seed == 7 and config.data.paths == ("a", "b c") and config.schedule.minutes == 4.5
    assert config.optimizer == OptimizerConfig(lr=1.0) and isinstance(config.optimizer.lr, float)
    assert config.compute.recompute == "block" and config.checkpoint == CheckpointSettings()
    model = config.model.build()
    assert (model.hidden_size, model.attn_res_block_size, model.mla_layers) == (32, None, (1, 2))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[optimizer]\nlearning_rate = 1.0\n", "optimizer.learning_rate is not a setting"),
        ("[optimzer]\nlr = 1.0\n", "optimzer is not a setting; did you mean 'optimizer'?"),
        ("[data]\ntoken_per_batch = 5\n", "data.token_per_batch is not a setting; did you mean 'tokens_per_batch'?"),
        ("[data]\ntokens_per_batch = 512.0\n", "data.tokens_per_batch is 512.0: it must be a whole number"),
        ("[data]\ntokens_per_batch = true\n", "data.tokens_per_batch is True: it must be a whole number"),
        ('[optimizer]\nlr = "high"\n', "optimizer.lr is 'high': it must be a number"),
        ("seed = -1\n", "seed is -1: it must be from 0 to below 2**63"),
        ("data = 5\n", "data is 5: it is a table, [data]"),
        ('[data]\npaths = "book.txt"\n', "data.paths is 'book.txt': it must be a list of strings"),
        ("[data]\npaths = [1]\n", "data.paths is [1]: it must be a list of strings"),
        ("[model]\nname = 5\n", "model.name is 5: it must be a string"),
        ('[compute]\nprecision = "fp16"\n', "compute.precision is 'fp16': it must be one of auto, fp32, bf16-autocast"),
        ('[compute]\ndevice = "tpu"\n', "compute.device is 'tpu': it must be auto, cpu or cuda"),
        ("[optimizer]\nper_head = 1\n", "optimizer.per_head is 1: it must be true or false"),
        ("[optimizer]\nlr = -1.0\n", "optimizer.lr = -1.0 is out of range"),
        ("[schedule]\nsteps = 0\n", "schedule.steps is 0: it must be 1 or more"),
        ("[schedule]\nminutes = nan\n", "schedule.minutes is nan: it must be above 0"),
        ("[schedule]\nsteps = 5\nminutes = 1\n", "schedule.steps and schedule.minutes are both given: a run has one end, give one of them"),
        ("[schedule]\nwarmup = 1.0\n", "schedule.warmup is 1.0: it must be from 0 to below 1"),
        ("[data]\nsequence_length = 8192\n", "data.sequence_length is 8192, more than the 4096 tokens of a batch (data.tokens_per_batch)"),
        ("[checkpoint]\nkeep = 0\n", "checkpoint.keep is 0: it must be 1 or more"),
        ("[guard]\nleap = 0\n", "guard.leap is 0.0: it must be above 0"),
    ],
)
def test_a_wrong_setting_is_named_with_its_file(tmp_path: Path, text: str, said: str) -> None:
    assert refusal(tmp_path, text) == said


def test_what_is_no_toml_is_said_with_its_line(tmp_path: Path) -> None:
    assert "not valid TOML" in (said := refusal(tmp_path, "seed = 1\nseed == 2\n")) and "line 2" in said


def test_what_is_no_text_is_said(tmp_path: Path) -> None:
    file = tmp_path / "train.toml"
    file.write_bytes(b"seed = 1\n# \xff\n")
    with pytest.raises(UserError, match=r"byte 11 is not UTF-8 text"):
        TrainConfig.from_toml(file)
    with pytest.raises(UserError, match=r"none\.toml: there is no such file"):
        TrainConfig.from_toml(tmp_path / "none.toml")
    with pytest.raises(UserError, match="cannot be read"):
        TrainConfig.from_toml(tmp_path)


def test_an_override_that_is_no_field_of_the_model_is_named() -> None:
    with pytest.raises(UserError, match="no field 'hidden'.*hidden_size"):
        with_overrides(TrainConfig(), {"hidden": 3}).model.build()
    with pytest.raises(UserError, match="hidden_size is 0"):
        with_overrides(TrainConfig(), {"hidden_size": 0}).model.build()
    with pytest.raises(UserError, match="no config is named|neither a named config"):
        ModelSettings(name="nanoo").build()


def test_later_overrides_win() -> None:
    config = with_overrides(with_overrides(TrainConfig(), {"num_heads": 2, "hidden_size": 8}), {"hidden_size": 16})
    assert config.model.overrides == {"num_heads": 2, "hidden_size": 16}


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(),
        TrainConfig(seed=2**63 - 1, start_from='a "b"\\c\n\x01ü', data=DataSettings(paths=("x", "\u2028é"), heldout=0.0)),
        TrainConfig(schedule=ScheduleSettings(minutes=0.1), compute=ComputeSettings(threads=2, device="cuda:1")),
        with_overrides(
            TrainConfig(), {"mla_layers": [1, 3], "rms_norm_eps": 1e-06, "latent_norm": False, "latent_size": "none", "family": "k"}
        ),
        TrainConfig(optimizer=OptimizerConfig(lr=1e-300, eps=5e-324, weight_decay=1e22)),
    ],
)
def test_what_is_dumped_is_read_back_equal(tmp_path: Path, config: TrainConfig) -> None:
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml(), encoding="utf-8")
    assert TrainConfig.from_toml(file) == config


@dataclasses.dataclass(frozen=True)
class Anything:
    table: dict[str, Any]


values = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=0, max_size=8), values, max_size=4))
def test_every_value_survives_the_writer(table: dict[str, Any]) -> None:
    import tomllib

    assert tomllib.loads(toml_tree.dump(Anything(table))).get("table", {}) == table


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("[1, 2]", [1, 2]),
        ("true", True),
        ("situ", "situ"),
        ('"a b"', "a b"),
        ("none", "none"),
        ("", ""),
        ("a=b", "a=b"),
        ("1\nb = 2", "1\nb = 2"),
    ],
)
def test_a_value_of_the_command_line(text: str, value: object) -> None:
    assert toml_tree.parse_value(text) == value and type(toml_tree.parse_value(text)) is type(value)
