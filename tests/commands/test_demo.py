"""`openk3 demo` from end to end on a small text, and what its summary says."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from openk3.checkpoint.shards import read_header
from openk3.commands import demo
from openk3.commands.demo_summary import Findings, Sample, memory_rows, smoothed, summary
from openk3.config import ModelConfig
from openk3.errors import UserError
from openk3.model.decoder import Decoder
from openk3.train.config import TrainConfig
from openk3.train.run import Metrics

FUNCTION = """\
def function_{n}(value, other={n}):
    if value is None:
        return other
    return value + {n}


"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the standard library that is read in no time; runs go below the working directory."""
    library = tmp_path / "library"
    library.mkdir()
    for n in range(12):
        (library / f"module_{n}.py").write_text("".join(FUNCTION.format(n=100 * n + m) for m in range(40)))
    monkeypatch.setattr("openk3.text.corpus.standard_library", lambda: sorted(library.iterdir()))
    recipe = demo.recipe

    def smaller(arguments: demo.Arguments) -> TrainConfig:
        config = recipe(arguments).to_toml()
        for name, value in {"tokens_per_batch": 256, "sequence_length": 64, "tokens": 512, "vocab_size": 320}.items():
            config = "\n".join(f"{name} = {value}" if line.startswith(f"{name} = ") else line for line in config.splitlines())
        (tmp_path / "smaller.toml").write_text(config.replace("[data]", "[data]\nvocab_size = 320"))
        return TrainConfig.from_toml(tmp_path / "smaller.toml")

    monkeypatch.setattr(demo, "recipe", smaller)
    monkeypatch.setattr(demo, "SAMPLE_TOKENS", 10)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_trains_writes_and_sums_up(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--minutes", "0.02", "--sft-minutes", "0", "--threads", "1"]) == 0
    shown = capsys.readouterr()
    assert "held-out loss" in shown.out and "bits a byte" in shown.out
    for part in (
        "Kimi Delta Attention",
        "Gated MLA",
        "Stable LatentMoE",
        "Attention Residuals",
        "expert load",
        "plot.png",
        "def ",
        "class ",
    ):
        assert part in shown.out
    assert "openk3 generate runs/demo --prompt" in shown.out
    assert "tokens/s" in shown.err
    run = small / "runs" / "demo"
    assert (run / "plot.png").stat().st_size > 1000
    rows = list(Metrics.read(run / "metrics.jsonl"))
    assert rows[-1]["heldout"] is not None

    # Again: the first run is left alone. Then its summary once more, which is the same but for speeds.
    assert demo.main(["--minutes", "0.01", "--sft-minutes", "0", "--threads", "1"]) == 0
    assert "runs/demo-2" in capsys.readouterr().out
    assert list(Metrics.read(run / "metrics.jsonl")) == rows
    assert demo.main(["--show", "runs/demo"]) == 0
    again = capsys.readouterr().out
    assert [line for line in again.splitlines() if "/s)" not in line] == [line for line in shown.out.splitlines() if "/s)" not in line]
    with pytest.raises(UserError, match="already holds a run"):
        demo.main(["--minutes", "0.01", "--out", "runs/demo"])


def test_interrupt_saves_and_says_how_to_go_on(small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    loss, calls = Decoder.loss, []

    def counted(self: Decoder, *arguments: Any, **settings: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(self, *arguments, **settings)

    monkeypatch.setattr(Decoder, "loss", counted)
    assert demo.main(["--minutes", "60", "--threads", "1"]) == 130
    shown = capsys.readouterr().out
    assert "openk3 resume runs/demo" in shown and "openk3 demo --show runs/demo" in shown
    assert demo.main(["--show", "runs/demo"]) == 0
    assert "3 tokens" not in capsys.readouterr().err


def test_recipe_trains_nano_with_every_system() -> None:
    config = demo.recipe(demo.Arguments(minutes=2.0, seed=7))
    assert config.schedule.minutes == 2.0 and config.seed == 7 and len(config.data.paths) > 100
    model = config.model.build()
    assert model.kda_layers and model.mla_layers and model.moe_layers and len(model.attn_res_blocks) >= 2 and model.latent_size
    with pytest.raises(UserError, match="minutes"):
        demo.recipe(demo.Arguments(minutes=0))


def test_directories_that_are_taken_are_passed_by(tmp_path: Path) -> None:
    assert demo.free_directory(tmp_path / "demo") == tmp_path / "demo"
    for name in ("demo", "demo-2", "demo-4"):
        (tmp_path / name).mkdir()
    assert demo.free_directory(tmp_path / "demo") == tmp_path / "demo-3"


def test_memory_by_system_adds_up() -> None:
    config = ModelConfig.named("nano")
    *parts, total = memory_rows(config)
    for column in (1, 2):
        assert sum(int(row[column].replace(",", "")) for row in parts) == int(total[column].replace(",", ""))
    assert int(total[1].replace(",", "")) >= sum(parameter.numel() for parameter in Decoder(config).parameters())


def test_smoothing_is_unbiased() -> None:
    assert smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert smoothed([1.0, 3.0], 0.5) == pytest.approx([1.0, 7 / 3])


@pytest.mark.parametrize("width", [60, 80, 200])
def test_summary_fits_its_width_and_a_young_run(width: int) -> None:
    found = Findings(
        run=Path("runs/demo"),
        config=ModelConfig.named("nano"),
        rows=[],
        heldout=None,
        bits_per_byte=None,
        samples=[Sample("def ", "f(x):\n\treturn 'ä" + "x" * 100 + "'\n")],
        decode_rate=10.0,
    )
    console = Console(width=width, record=True, file=open(os.devnull, "w"))
    console.print(summary(found, width))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "nothing to draw yet" in text and "no experts" in text


def test_fine_tunes_packs_and_says_what_rounding_costs(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    function = 'def f{n}(x):\n    """Return x and {n}."""\n    y = x + {n}\n    return y\n\n'
    file = small / "library" / "documented.py"
    file.write_text("".join(function.format(n=n) for n in range(60)))
    assert demo.main(["--minutes", "0.02", "--sft-minutes", "0.01", "--threads", "1"]) == 0
    shown = capsys.readouterr().out
    for part in ("held-out loss", "bf16", "rounded afterwards (PTQ)", "rounded in training (QAT)", "runs/demo-exported", "--chat"):
        assert part in shown
    runs = small / "runs"
    assert {entry.name for entry in runs.iterdir()} >= {"demo", "demo-plain", "demo-chat", "demo-exported"}
    assert any("weight_packed" in name for name in read_header(runs / "demo-exported" / "model.safetensors"))
