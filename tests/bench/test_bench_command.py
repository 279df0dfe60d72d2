"""Mistakes on `openk3 bench`'s command line, and how arguments of any verb are refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import tyro

from openk3.commands import bench
from openk3.commands._base import parse
from openk3.errors import UserError


@dataclass(frozen=True)
class Arguments:
    run: Annotated[str, tyro.conf.Positional]
    """The run directory."""
    steps: int = 3
    """How many."""

    def __post_init__(self) -> None:
        if self.steps == 0:
            raise UserError("steps 0: at least 1")


def parsed(*argv: str, default: Arguments | None = None) -> Arguments:
    return parse(Arguments, argv, verb="try", description="Tries.", examples=("openk3 try runs/a",), default=default)


def test_arguments_are_read() -> None:
    assert parsed("runs/a", "--steps", "5") == Arguments("runs/a", 5)
    assert parsed("runs/a") == Arguments("runs/a", 3)
    assert parsed(default=Arguments("runs/b", 9)) == Arguments("runs/b", 9)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["runs/a", "--stepz", "5"], "Unrecognized options: --stepz, 5"),
        (["runs/a", "--steps", "five"], "Error parsing --steps: invalid literal for int() with base 10: 'five'"),
        (["runs/a", "--steps", "0"], "steps 0: at least 1"),
        ([], "Missing from openk3 try: STR The run directory. (required)"),
    ],
)
def test_what_is_refused_is_said_in_one_line(argv: list[str], reason: str) -> None:
    with pytest.raises(UserError) as refused:
        parsed(*argv)
    message = str(refused.value)
    assert message.startswith(reason) and message.endswith("; see openk3 try --help") and "\n" not in message


def test_help_shows_the_example_and_exits_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parsed("--help")
    assert not stop.value.code
    text = capsys.readouterr().out
    assert "Tries." in text and "openk3 try runs/a" in text and "How many." in text


def test_the_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["kda", "train"]


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["kad"], "there is no benchmark 'kad'; choose all or one of kda, train"),
        (["kda", "--threads", "0"], "--threads 0: at least 1"),
        (["kda", "--runs", "-1"], "--runs -1: at least 1"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(argv: list[str], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        bench.main(argv)


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        bench.main(["kda", "--json", str(tmp_path / "no" / "bench.json")])
    with pytest.raises(UserError, match="a directory"):
        bench.main(["kda", "--json", str(tmp_path)])
